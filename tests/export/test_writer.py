"""A checkpoint is whole or not there: a taken target, a full disk, Ctrl-C, a kill. And it takes little memory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import save_file

import fp4ext
from fp4ext import QTensor
from fp4ext.export import Refused, inspect, load, save
from fp4ext.export.folder import Folder
from fp4ext.testing import assert_bytes_equal

from .models import folder_of
from .weights import dense_model, same, weight

HERE = Path(fp4ext.__file__).parent.parent


def test_a_target_that_is_taken(tmp_path):
    out, x = tmp_path / "out", {"a.weight": weight(64, 64)}
    out.mkdir()
    save(x, out)  # empty: fine
    with pytest.raises(Refused, match="holds a checkpoint; accepted: .* overwrite"):
        save(x, out)
    save({"b.weight": weight(64, 64)}, out, overwrite=True)
    assert list(load(out)) == ["b.weight"] and [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(Refused, match="holds other files"):
            save(x, tmp_path / "mine", overwrite=overwrite)
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="not a folder"):
        save(x, tmp_path / "file")
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(Refused, match="not a folder"):
        save(x, tmp_path / "link", overwrite=True)


def test_the_source_may_be_overwritten(tmp_path):
    folder_of(tmp_path / "in", dense_model())
    save(tmp_path / "in", tmp_path / "in", overwrite=True)
    assert load(tmp_path / "in").layout.name == "compressed-tensors"


@pytest.mark.parametrize("at", ["save_file", "rename", "publish", "fsync"])
def test_a_disk_that_gives_out(at, tmp_path, monkeypatch):
    """At any step: the old checkpoint is whole, nothing else is left."""
    from fp4ext.export import writer

    out = tmp_path / "out"
    save({"a.weight": weight(64, 64)}, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    where = {"save_file": (writer, "save_file"), "publish": (writer, "publish")}.get(at, (os, at))
    monkeypatch.setattr(*where, full)
    with pytest.raises(OSError, match="No space left"):
        save(dense_model(), out, overwrite=True, shard=10_000)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("layout", ["compressed-tensors", "inkling2", "fp4ext"])
def test_a_disk_without_room_is_refused_at_the_beginning(layout, tmp_path, monkeypatch):
    """By what the checkpoint will take beside the old one, before a byte of a weight is read."""
    source = folder_of(tmp_path / "in", dense_model() | {"m.experts.w2_weight": weight(4, 64, 64)})
    report = save(source, tmp_path / "out", layout)
    taken = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def disk(free):
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))

    disk(report.bytes - 1)
    monkeypatch.setattr(Folder, "read", lambda self, name: pytest.fail(f"{name} was read"))
    with pytest.raises(
        Refused, match=r"out: needs [\d,]+ bytes .* the disk has [\d,]+ free; accepted: a disk with room"
    ):
        save(source, tmp_path / "out", layout, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    monkeypatch.undo()
    disk(taken + 20_000)  # and no more is asked for than it takes, names aside
    save(source, tmp_path / "deep" / "er", layout)


FULL = """
import resource, signal, sys
from fp4ext.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
sys.exit(main(["export", {source!r}, {out!r}, "--overwrite"]))
"""


def test_a_disk_that_fills_up_in_the_middle(tmp_path):
    """The system itself refuses to write on: one line, exit code 1, and the old checkpoint is whole."""
    save({"a.weight": weight(64, 64)}, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    source = folder_of(tmp_path / "in", {f"l.{i}.weight": weight(256, 256) for i in range(4)})
    script = FULL.format(source=str(source), out=str(tmp_path / "out"))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=HERE)
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1, ran.stderr
    assert "out could not be written: " in ran.stderr and "what was there is as it was" in ran.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_stopped_in_the_middle(tmp_path):
    """Ctrl-C while shards are written over a checkpoint: one line, exit code 130, nothing is left of it."""
    out = tmp_path / "out"
    save({"a.weight": weight(64, 64)}, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    command = [sys.executable, "-m", "fp4ext", "export", str(large(tmp_path)), str(out), "--shard", "1", "--overwrite"]
    # What a shell runs in the background ignores SIGINT, and so would all that it starts.
    heard = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    process = subprocess.Popen(command, cwd=HERE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    wait_for_shards(tmp_path, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and f"stopped; nothing of {out} was changed" in process.stderr.read()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def large(tmp_path):
    """A checkpoint that takes a while."""
    w = weight(512, 1024)
    return folder_of(tmp_path / "in", {f"l.{i}.weight": w.clone() for i in range(40)})


def wait_for_shards(tmp_path, process):
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob(".out.writing-*/shard-3")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


def test_killed_in_the_middle(tmp_path):
    """SIGKILL while shards are written over a checkpoint: the old one stays whole."""
    out = tmp_path / "out"
    save({"a.weight": weight(64, 64)}, out)
    before = (out / "model.safetensors").read_bytes()
    big = large(tmp_path)
    code = f"import fp4ext.export as e; e.save({str(big)!r}, {str(out)!r}, shard=1<<20, overwrite=True)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=HERE)
    wait_for_shards(tmp_path, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (out / "model.safetensors").read_bytes() == before and list(load(out)) == ["a.weight"]


def test_shards_and_index(tmp_path):
    report = save(dense_model(), tmp_path / "out", shard=8_000)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 4 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.bytes and set(index["weight_map"].values()) == set(shards)
    save(dense_model(), tmp_path / "one")
    one, many = load(tmp_path / "one"), load(tmp_path / "out")
    for name, w in one.items():
        same(many[name], w) if isinstance(w, QTensor) else assert_bytes_equal(many[name], w)
    report = save(dense_model(), tmp_path / "fp4ext", "fp4ext", shard=8_000)
    assert report.quantized["model.layers.0.odd.weight"] == "nvfp4"  # padded inside: only here
    for name, w in load(tmp_path / "fp4ext").items():
        if name != "model.layers.0.odd.weight":
            same(w, one[name]) if isinstance(w, QTensor) else assert_bytes_equal(w, one[name])


PEAK = """
import torch, fp4ext.export as export
torch.set_num_threads(1)
policy = "nvfp4/amax/nearest/1x16/pow2"
export.save({{"a.weight": torch.randn(64, 64).bfloat16()}}, {small!r}, policy=policy)
def peak():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
open("/proc/self/clear_refs", "w").write("5")
before = peak()
export.save({source!r}, {out!r}, policy=policy, shard=8 << 20)
print(peak() - before)
"""


PARTS = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]


@pytest.mark.slow
def test_memory_is_a_shard_and_a_layer(tmp_path):
    """A checkpoint of 235 MB goes through less than 38 MB: a shard of 8 MiB and a layer of 7 matrices, 29 MB.

    Peak resident memory over that after a first small export, in a process of its own.
    """
    w, folder, weight_map = weight(1024, 2048), tmp_path / "in", {}
    folder.mkdir()
    for i in range(8):
        shard, names = f"model-{i:05}.safetensors", [f"l.{i}.{part}.weight" for part in PARTS]
        save_file({name: w.clone() for name in names}, folder / shard)
        weight_map |= dict.fromkeys(names, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    limit, size = (8 << 20) + 7 * w.nbytes, sum(path.stat().st_size for path in folder.iterdir())
    assert size > 6 * limit
    paths = {"small": tmp_path / "small", "source": folder, "out": tmp_path / "out"}
    script = PEAK.format(**{name: str(path) for name, path in paths.items()})
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=HERE)
    assert run.returncode == 0, run.stderr
    used = int(run.stdout)
    print(f"{used / 1e6:.1f} MB of {limit / 1e6:.1f}")
    assert 8e6 < used <= limit, f"{used / 1e6:.1f} MB, accepted: {limit / 1e6:.1f}"
    assert inspect(tmp_path / "out").bits == pytest.approx(4.5, abs=0.01)
