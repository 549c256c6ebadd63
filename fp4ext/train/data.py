"""Text as bytes: which files, which of them are held out, and which window each step reads.

- The corpus is every file in sorted order, each closed by a zero byte. By default: the running interpreter's standard
  library.
- A file is held out for validation when blake2(its path inside the given folder) falls into the first twentieth: a
  new file never moves an old one. Where that holds out less than 1 % or more than 20 % of the bytes (few files), it
  is the last twentieth of each file.
- A batch is a pure function of (seed, step), so a resumed run reads what it would have read, and every policy reads
  the same.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from fp4ext.errors import Refused

from . import task

TASK = "task:"  # what comes before a task's name where a path is asked for
HELD_OUT = 20  # one part in so many
ACCEPTED = "accepted: text files, or folders with text files in them"
SKIPPED_STDLIB = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes, and what identifies them.

    Attributes:
        train, valid: one-dimensional uint8.
        files: how many files were read.
        digest: blake2 over all names and contents, in order; equal digests mean equal batches.
        source: what a person would call it.
    """

    train: np.ndarray
    valid: np.ndarray
    files: int
    digest: str
    source: str

    def batch(self, seed: int, step: int, batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets [batch, context] of a training step."""
        rng = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
        return _windows(self.train, rng.integers(0, len(self.train) - context, size=batch), context)

    def windows(self, count: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """At most `count` validation windows [n, context], evenly spread and without overlap: the same in every run."""
        last = len(self.valid) - context - 1
        count = min(count, last // context + 1)
        starts = np.linspace(0, last, count).astype(np.int64)
        return _windows(self.valid, starts, context)

    def facts(self) -> dict:
        """What config.json keeps of it."""
        return {
            "source": self.source,
            "files": self.files,
            "train_bytes": len(self.train),
            "valid_bytes": len(self.valid),
            "digest": self.digest,
        }


def load(paths: Sequence[str | os.PathLike] = (), context: int = 128) -> Corpus:
    """Read files and folders (none: the standard library's source) into a Corpus.

    Args:
        paths: files, taken as they are, and folders, searched for text files. Hidden and binary files in folders are
            passed over. Or "task:NAME" alone: the text of a task.
        context: the window's length, for the least amount of text that will do.

    Raises:
        Refused: a path that is missing, unreadable, empty or neither file nor folder; too little text.
    """
    if any(map(is_task, paths)):
        texts = [_task_text(paths)]
    else:
        found = _search([Path(p) for p in paths]) if paths else _stdlib()
        texts = [(name, _read(path)) for name, path in found]
    if paths and not is_task(paths[0]):
        given = {str(p) for p in paths}
        texts = [pair for pair, (_, path) in zip(texts, found, strict=True) if str(path) in given or is_text(pair[1])]
    if not texts:
        raise Refused(f"--data {' '.join(map(str, paths))}: no text file found; {ACCEPTED}")

    digest = blake2b(digest_size=16)
    for name, text in texts:
        digest.update(f"{name}\0{len(text)}\0".encode("utf-8", "surrogateescape"))
        digest.update(text)
    train, valid = split(texts)
    if min(len(train), len(valid)) <= context:
        what = " ".join(map(str, paths)) or "the standard library"
        size = sum(len(t) for _, t in texts)
        least = HELD_OUT * (context + 1)
        raise Refused(
            f"--data {what}: {size} bytes are too little text; accepted: about {least} or more at context {context}"
        )
    source = ", ".join(Path(p).name or str(p) for p in paths) or "Python standard library"
    return Corpus(train, valid, len(texts), digest.hexdigest(), source)


def split(texts: list[tuple[str, bytes]]) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation bytes of (name, contents) pairs, by the rule at the top of this file."""
    total = sum(len(text) for _, text in texts)
    held = sum(len(text) for name, text in texts if held_out(name))
    if 0.01 * total <= held <= 0.2 * total:
        train = [text for name, text in texts if not held_out(name)]
        valid = [text for name, text in texts if held_out(name)]
    else:
        cuts = [len(text) - len(text) // HELD_OUT for _, text in texts]
        train = [text[:cut] for (_, text), cut in zip(texts, cuts, strict=True)]
        valid = [text[cut:] for (_, text), cut in zip(texts, cuts, strict=True)]
    return _join(train), _join(valid)


def held_out(name: str) -> bool:
    """Whether the file of that name (posix, inside its folder) is validation text."""
    digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0


def is_text(contents: bytes) -> bool:
    """Whether a file found in a folder is read: it has contents, and no zero byte at its beginning."""
    return bool(contents) and b"\0" not in contents[:8192]


def is_task(path: str | os.PathLike) -> bool:
    """Whether it names a task instead of a file."""
    return str(path).startswith(TASK)


def agreed(kept: Sequence[str], given: Sequence[str] | None, run: Path) -> Sequence[str]:
    """The paths to `load` a run's text from, by the rule of task.agreed: those that config.json names, or `given`."""
    if not given:
        for path in filter(is_task, kept):
            task.agreed(path.removeprefix(TASK), None, run, f"--data {TASK}")
    return given or kept


def _task_text(paths: Sequence[str | os.PathLike]) -> tuple[str, bytes]:
    if len(paths) > 1:
        raise Refused(f"--data {' '.join(map(str, paths))}: a task beside others; accepted: {TASK}NAME alone, or paths")
    name = str(paths[0]).removeprefix(TASK)
    text = task.load(name).text(task.generator(0))
    if not isinstance(text, str):
        raise Refused(f"--task {name}: its text is a {type(text).__name__}; accepted: str")
    return name, text.encode()


def _join(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(part for text in texts for part in (text, b"\0")), dtype=np.uint8)


def _windows(data: np.ndarray, starts: np.ndarray, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.from_numpy(data[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _stdlib() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [(name, path) for name, path in _walk(root, SKIPPED_STDLIB) if name.endswith(".py")]
    if not found:
        raise Refused(f"no source of the standard library in {root}; accepted: --data with files or folders of text")
    return found


def _search(paths: list[Path]) -> list[tuple[str, Path]]:
    found: dict[str, tuple[str, Path]] = {}  # by real path: a file that is named twice counts once
    for path in paths:
        if path.is_dir():
            here = _walk(path)
        elif path.is_file():
            here = [(path.name, path)]
            if path.stat().st_size == 0:
                raise Refused(f"--data {path}: the file is empty; {ACCEPTED}")
        elif path.exists():
            raise Refused(f"--data {path}: neither a file nor a folder; {ACCEPTED}")
        else:
            raise Refused(f"--data {path}: no such file or folder; {ACCEPTED}")
        for name, file in here:
            found.setdefault(os.path.realpath(file), (name, file))
    return sorted(found.values(), key=lambda pair: (pair[0], str(pair[1])))


def _walk(root: Path, skipped: Collection[str] = ()) -> list[tuple[str, Path]]:
    """The regular, unhidden files under root, as (posix path inside root, path), sorted; `skipped` names folders."""

    def refuse(error: OSError):
        raise Refused(
            f"--data {error.filename}: cannot be read ({error.strerror}); accepted: readable folders"
        ) from None

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in skipped]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(f"--data {path}: cannot be read ({error.strerror}); accepted: readable text files") from None
