"""What a stranger's folder may cost, what it may do to a terminal, and what is never removed or dropped in silence."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fp4ext
from fp4ext.cli import main
from fp4ext.export import Refused, convert_checkpoint, inspect, load, save
from fp4ext.export.errors import shown
from fp4ext.export.folder import Folder
from fp4ext.export.writer import Writer

from .models import folder_of
from .weights import dense_model, weight

HERE = Path(fp4ext.__file__).parent.parent


def header_file(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


# Time


def test_a_name_that_is_there_twice_is_found_at_once(tmp_path):
    """100,000 names, the last of them twice: seconds per million names, not the square of it (it was minutes)."""
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    names = [f'"{i}":{entry}' for i in range(100_000)] + [f'"99999":{entry}']
    path = header_file(tmp_path / "a.safetensors", ("{" + ",".join(names) + "}").encode())
    start = time.process_time()
    with pytest.raises(Refused, match="'99999' is there twice"):
        load(path)
    assert time.process_time() - start < 10


def test_a_header_is_parsed_once_however_many_tensors_are_read(tmp_path):
    """30,000 tensors: 200 reads cost little more than opening (each parsed the header again: 80 ms)."""
    save_file({f"model.layers.{i}.weight": torch.ones(1) for i in range(30_000)}, tmp_path / "model.safetensors")
    folder = Folder(tmp_path)
    folder.read("model.layers.0.weight")
    start = time.process_time()
    for i in range(200):
        assert folder.read(f"model.layers.{i}.weight") == 1
    assert time.process_time() - start < 1


def test_inspect_does_not_try_every_pattern_on_every_name(tmp_path):
    tensors = {}
    for i in range(500):
        q = fp4ext.quantize(torch.ones(1, 32), "mxfp8")
        tensors |= {f"l.{i}.weight": q.codes, f"l.{i}.weight_scale": q.scales.view(torch.uint8)}
    about = {"quant_method": "compressed-tensors", "ignore": [f"x.{i}" for i in range(20_000)]}
    about["ignore"] += [f"*{i}*never*" for i in range(2_000)] + ["*" * 500 + "x", "l.7"]
    folder_of(tmp_path, tensors, {"quantization_config": about})
    start = time.process_time()
    assert [f for f in inspect(tmp_path).faults if "excludes" in f] == [
        "'l.7.weight' is quantized, the config excludes it ('l.7')"
    ]
    assert time.process_time() - start < 10


# The target


def test_what_appears_under_the_targets_name_is_kept(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Refused, match="appeared while it was written"), Writer(out) as writer:
        writer.add("a", torch.ones(2))
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    assert (out / "notes.txt").read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_appears_in_a_checkpoint_that_is_replaced_is_kept(tmp_path):
    out = tmp_path / "out"
    save({"a.weight": weight(64, 64)}, out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(Refused, match="was changed while"), Writer(out, overwrite=True) as writer:
        writer.add("a", torch.ones(2))
        (out / "notes.txt").write_text("mine")
    assert (out / "notes.txt").read_text() == "mine" and (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
def test_of_two_writers_one_wins_and_the_other_says_so(there, tmp_path):
    out = tmp_path / "out"
    if there != "nothing":
        out.mkdir()
    with pytest.raises(Refused, match="appeared while it was written"), Writer(out) as late:
        late.add("late", torch.ones(2))
        with Writer(out) as first:
            first.add("first", torch.ones(2))
    assert list(load(out)) == ["first"] and [p.name for p in tmp_path.iterdir()] == ["out"]


KILLED = """
import os, sys, torch
from fp4ext.export.writer import Writer
with Writer(sys.argv[1]) as w:
    w.add("a", torch.ones(2))
    if sys.argv[2] == "die":
        os.kill(os.getpid(), 9)
"""


def test_a_killed_writers_folder_is_removed_by_the_next_one(tmp_path):
    """And that of a writer at work is not."""
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", KILLED, str(out), "die"], cwd=HERE)
    assert len(list(tmp_path.glob(".out.writing-*"))) == 1
    (tmp_path / ".out.writing-mine").mkdir()
    with Writer(tmp_path / "out2") as other, Writer(out) as writer:
        writer.add("a", torch.ones(2))
        other.add("a", torch.ones(2))
        assert len(list(tmp_path.glob(".out.writing-????????"))) == 1
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out2"), "live"], cwd=HERE, check=True)
        assert len(list(tmp_path.glob(".out2.writing-*"))) == 1
        (tmp_path / "out2").rename(tmp_path / "out3")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.writing-mine", "out", "out2", "out3"]


# Words on a terminal

NASTY = [
    "a\x1b[31mred.q_proj.weight",
    "a[/red]b.q_proj.weight",
    "a\u202eb.q_proj.weight",
    "\x07" + "x" * 5000 + ".weight",
]


@pytest.mark.parametrize("name", NASTY, ids=range(len(NASTY)))
def test_names_do_nothing_to_a_terminal(name, tmp_path, capsys):
    folder_of(tmp_path / "in", {name: weight(64, 64), "z.weight": weight(64, 64)})
    report = save(tmp_path / "in", tmp_path / "out", progress=True)
    assert set(report.quantized) == {name, "z.weight"}
    assert main(["inspect", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "config.json").unlink()
    assert main(["inspect", str(tmp_path / "out")]) == 2
    out = capsys.readouterr().out
    for text in (out, str(report), str(inspect(tmp_path / "out"))):
        assert not any(ord(c) < 32 or c in "\x7f\u202e" for c in text.replace("\n", ""))


def test_a_refusal_is_one_printable_line_of_bounded_length(tmp_path):
    for name in (*NASTY, "a\nb"):
        path = tmp_path / "a.safetensors"
        header = json.dumps({name: {"dtype": "F8_E4M3", "shape": [0, 1], "data_offsets": [0, 0]}}).encode()
        with pytest.raises(Refused) as error:
            load(header_file(path, header))
        message = str(error.value)
        assert len(message) < 1100 and message.isprintable(), message
    assert shown("a\x1bb\ud800") == "a\\x1bb\\ud800"


@pytest.mark.parametrize("where", ["name", "metadata"])
def test_half_a_surrogate_pair_is_refused(where, tmp_path):
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = {"a\ud800": entry} if where == "name" else {"__metadata__": {"k": "\udfff"}, "a": entry}
    with pytest.raises(Refused, match="surrogate"):
        load(header_file(tmp_path / "a.safetensors", json.dumps(header).encode()))


# Everything in the folder


def test_a_git_lfs_pointer_is_called_one(tmp_path):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (tmp_path / "model.safetensors").write_text(text)
    with pytest.raises(Refused, match="a Git LFS pointer.*git lfs pull"):
        load(tmp_path)


def beside(folder: Path, indexed: bool) -> Path:
    """A checkpoint with part of the model in a file that nothing names."""
    folder.mkdir()
    dense = dense_model()
    first = "model-00001-of-00001.safetensors" if indexed else "model.safetensors"
    save_file(dense, folder / first)
    if indexed:
        index = {"weight_map": dict.fromkeys(dense, first)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"mtp.q_proj.weight": weight(64, 64)}, folder / "mtp.safetensors")
    save_file({"layers.0.wq.weight": weight(64, 64)}, folder / "consolidated.safetensors")
    save_file(dense, folder / "model.fp16.safetensors")
    return folder


@pytest.mark.parametrize("indexed", [True, False])
def test_weights_in_a_file_that_the_index_does_not_name(indexed, tmp_path):
    folder = beside(tmp_path / "in", indexed)
    assert "mtp.q_proj.weight" in load(folder) and "layers.0.wq.weight" not in load(folder)
    report = save(folder, tmp_path / "out", "compressed-tensors")
    assert "mtp.q_proj.weight" in report.quantized and "mtp.q_proj.weight" in load(tmp_path / "out")
    assert report.aside == dict.fromkeys(("consolidated.safetensors", "model.fp16.safetensors"), "other weights")
    assert "mtp.q_proj.weight" in convert_checkpoint(tmp_path / "out", tmp_path / "two", "modelopt").quantized
    assert "not copied: consolidated.safetensors" in str(report)


def test_a_model_need_not_have_what_lies_beside(tmp_path):
    folder = tmp_path / "in"
    folder_of(folder, {"0.weight": weight(64, 64)})
    save_file({"mtp.weight": weight(64, 64)}, folder / "mtp.safetensors")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    with pytest.warns(UserWarning, match="mtp.weight"):
        load(folder, model)
    assert torch.equal(model[0].weight, weight(64, 64).float())


def test_files_that_are_not_copied_are_reported(tmp_path):
    folder = folder_of(tmp_path / "in", {"a.weight": weight(64, 64)}, {"model_type": "x"})
    (tmp_path / "secret").write_text("secret")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    (folder / "generation_config.json").write_text("{}")
    (folder / "merges.txt").symlink_to(folder / "generation_config.json")
    for name in ("id_rsa", "LICENSE", "NOTICE", "modeling.py", ".env"):
        (folder / name).write_text("x")
    (folder / "assets").mkdir()
    os.mkfifo(folder / "pipe.json")
    report = save(folder, tmp_path / "out")
    kept = {"model.safetensors", "config.json", "generation_config.json", "merges.txt", "LICENSE", "NOTICE"}
    kept.add("fp4ext.json")
    assert {p.name for p in (tmp_path / "out").iterdir()} == kept
    assert report.aside == {
        "tokenizer.json": "a link that leaves the checkpoint",
        "id_rsa": "of a kind that is not copied",
        "modeling.py": "of a kind that is not copied",
        ".env": "hidden",
        "assets": "a folder",
        "pipe.json": "not a regular file",
    }


def test_links_of_the_hugging_face_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a.weight": weight(64, 64)}, blobs / "1")
    (blobs / "2").write_text("{}")
    (snapshot / "model.safetensors").symlink_to(blobs / "1")
    (snapshot / "tokenizer.json").symlink_to(blobs / "2")
    assert not save(snapshot, tmp_path / "out").aside and (tmp_path / "out" / "tokenizer.json").exists()


def test_the_same_file_byte_for_byte(tmp_path):
    """Whatever the order in which the library's hash map gives the metadata: 1 of 48! were the chance."""
    x = {f"l.{i}.weight": weight(64, 64, seed=i) for i in range(16)} | {"ü\n\t\u2028.weight": weight(64, 64)}
    for name in ("a", "b"):
        save(x, tmp_path / name, "fp4ext")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert one == two and len(load(tmp_path / "a")) == 17
