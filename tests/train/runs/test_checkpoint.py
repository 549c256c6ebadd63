"""A checkpoint is whole or not there."""

import errno
import json
import os

import pytest
import torch

from fp4ext.train import Refused, Stopped
from fp4ext.train.runs import checkpoint


def files(value: float):
    return [("a.weights", {"w": torch.full((3, 5), value), "n": torch.tensor(7.0)}), ("a.optimizer", {})]


def test_round_trip_and_only_the_newest_stays(tmp_path):
    checkpoint.save(tmp_path, 1, files(1.0), {"metrics_bytes": 5})
    checkpoint.save(tmp_path, 10, files(2.0), {"metrics_bytes": 9})
    manifest, loaded = checkpoint.load(tmp_path)
    assert manifest["step"] == 10 and manifest["metrics_bytes"] == 9
    assert torch.equal(loaded["a.weights"]["w"], torch.full((3, 5), 2.0)) and loaded["a.optimizer"] == {}
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000010"]


@pytest.mark.parametrize("call, good", [("fsync", 0), ("fsync", 1), ("fsync", 2), ("rename", 0)])
def test_full_disk_leaves_the_previous(tmp_path, monkeypatch, call, good):
    """The disk fills up after `good` calls: at the first file, the second, the manifest, the renaming."""
    checkpoint.save(tmp_path, 1, files(1.0), {})
    real, calls = getattr(os, call), []

    def full(*args):
        calls.append(args)
        if len(calls) > good:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(Stopped, match="step 2 could not be written: No space left on device; intact: .*step-00000001"):
        checkpoint.save(tmp_path, 2, files(2.0), {})
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.load(tmp_path)[1]["a.weights"]["w"][0, 0] == 1.0
    checkpoint.save(tmp_path, 2, files(2.0), {})
    assert checkpoint.load(tmp_path)[0]["step"] == 2


def test_leftovers_of_a_crash_are_ignored(tmp_path):
    checkpoint.save(tmp_path, 1, files(1.0), {})
    (tmp_path / ".writing").mkdir()
    (tmp_path / ".writing" / "a.weights.safetensors").write_bytes(b"half")
    assert checkpoint.load(tmp_path)[0]["step"] == 1
    checkpoint.save(tmp_path, 2, files(2.0), {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-8])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name, damage, words",
    [
        ("a.weights.safetensors", cut, r"has \d+ of its \d+ bytes"),
        ("a.weights.safetensors", flip, "digests differ"),
        ("a.optimizer.safetensors", os.unlink, "cannot be read"),
        ("manifest.json", cut, "manifest.json"),
        ("manifest.json", os.unlink, "manifest.json"),
        ("manifest.json", lambda path: path.write_text(json.dumps([])), "manifest.json"),
    ],
)
def test_damage_is_refused(tmp_path, name, damage, words):
    damage(checkpoint.save(tmp_path, 1, files(1.0), {}) / name)
    with pytest.raises(Refused, match=f"is damaged: .*{words}"):
        checkpoint.load(tmp_path)


def test_none_is_refused(tmp_path):
    with pytest.raises(Refused, match="no checkpoint"):
        checkpoint.load(tmp_path)
