"""Which bytes are trained on, which are held out, and in which order."""

import os

import numpy as np
import pytest
import torch

from fp4ext.train import Refused, data


def folder(tmp_path, files: dict[str, bytes]):
    for name, contents in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
    return tmp_path


def many(count: int) -> dict[str, bytes]:
    return {f"chapter{i % 7}/page{i}.txt": f"page {i} ".encode() * 200 for i in range(count)}


def test_default_is_the_standard_library():
    corpus = data.load()
    assert len(corpus.train) > 5e6 and len(corpus.train) > 10 * len(corpus.valid) > 1e6
    assert corpus.source == "Python standard library" and corpus.files > 300


def test_split_is_by_file_and_stable(tmp_path):
    root = folder(tmp_path, many(200))
    before = data.load([root])
    held = {name for name in many(200) if data.held_out(name)}
    assert before.valid.tobytes() == b"".join(many(200)[name] + b"\0" for name in sorted(held))
    folder(tmp_path, {"chapter1/new.txt": b"something new " * 100})
    after = data.load([root])
    assert after.digest != before.digest
    assert len(after.train) + len(after.valid) == len(before.train) + len(before.valid) + 1401
    for name in held:
        assert many(200)[name] in after.valid.tobytes()


def test_split_golden():
    """The hash is part of the format: a change would mix training and validation text of older runs."""
    assert [i for i in range(200) if data.held_out(f"page{i}.txt")] == GOLDEN


GOLDEN = [5, 26, 42, 69, 79, 108, 112, 146, 155]


def test_few_files_hold_out_their_ends(tmp_path):
    contents = bytes(range(1, 201)) * 20
    corpus = data.load([folder(tmp_path, {"a.txt": contents}) / "a.txt"])
    assert corpus.train.tobytes() == contents[:3800] + b"\0" and corpus.valid.tobytes() == contents[3800:] + b"\0"


def test_order_does_not_depend_on_arguments(tmp_path):
    root = folder(tmp_path, many(40))
    paths = sorted(root.rglob("*.txt"))
    assert data.load(paths).digest == data.load(paths[::-1]).digest == data.load([*paths, *paths]).digest


def test_folders_skip_hidden_binary_and_special_files(tmp_path):
    root = folder(tmp_path, many(40) | {".git/x": b"hidden" * 99, "x.bin": b"a\0b" * 999, "empty.txt": b""})
    os.mkfifo(root / "pipe")
    assert data.load([root]).files == 40


def test_batches_are_a_function_of_seed_and_step(text):
    corpus = data.load([text])
    x, y = corpus.batch(3, 7, 4, 32)
    again = data.load([text]).batch(3, 7, 4, 32)
    assert torch.equal(x, again[0]) and torch.equal(x[:, 1:], y[:, :-1]) and x.shape == (4, 32)
    assert not torch.equal(x, corpus.batch(3, 8, 4, 32)[0]) and not torch.equal(x, corpus.batch(4, 7, 4, 32)[0])


def test_validation_windows_do_not_overlap(text):
    corpus = data.load([text])
    x, y = corpus.windows(10**6, 32)
    assert len(x) == (len(corpus.valid) - 33) // 32 + 1
    starts = np.linspace(0, len(corpus.valid) - 33, len(x)).astype(int)
    assert (np.diff(starts) >= 32).all() and torch.equal(x[-1, 1:], y[-1, :-1])


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p: p / "nothing", "no such file or folder"),
        (lambda p: folder(p, {"empty.txt": b""}) / "empty.txt", "the file is empty"),
        (lambda p: folder(p, {"short.txt": b"too short"}) / "short.txt", "too little text"),
        (lambda p: p, "no text file found"),
        (lambda p: os.mkfifo(p / "pipe") or p / "pipe", "neither a file nor a folder"),
    ],
)
def test_refuses(tmp_path, make, words):
    path = make(tmp_path)
    with pytest.raises(Refused, match=words) as error:
        data.load([path])
    assert str(path) in str(error.value) and "accepted: " in str(error.value)


def test_refuses_unreadable(tmp_path, monkeypatch):
    path = folder(tmp_path, {"secret.txt": b"text " * 999}) / "secret.txt"
    monkeypatch.setattr(
        "pathlib.Path.read_bytes", lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    with pytest.raises(Refused, match="secret.txt: cannot be read .Permission denied"):
        data.load([path])
