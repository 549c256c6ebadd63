"""A run directory: everything that a run leaves behind, and what it needs to go on.

    config.json     what was asked for, which text, which versions; enough to repeat the run
    metrics.jsonl   a line for each policy (or arm of RL) and logged step
    checkpoints/    the newest step (checkpoint.py)
    tensorboard/    the metrics once more, a folder for each policy, if tensorboard is installed
    result.json, report.html, loss.png     at the end

A checkpoint remembers how long metrics.jsonl was. Resuming cuts the file there, so that what follows is written once.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from . import checkpoint
from .config import compare
from .errors import Refused

APPEND = os.O_RDWR | os.O_APPEND


class Run:
    """An open run directory, locked against a second process: `with create(…)` or `with reopen(…)`."""

    def __init__(self, path: Path, config: dict, lock: int, metrics: int):
        self.path, self.config = path, config
        self._lock, self._metrics = lock, metrics
        self._boards: dict | None = {}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def log(self, lines: list[dict]) -> None:
        """Append lines to metrics.jsonl and to TensorBoard."""
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with checkpoint.told("metrics.jsonl", kept=checkpoint.latest(self.checkpoints)):
            data = text.encode()
            while data:
                data = data[os.write(self._metrics, data) :]
        for line in lines:
            self._board(line)

    def mark(self) -> int:
        """The length of metrics.jsonl, once all of it is on the disk. A checkpoint keeps it."""
        os.fsync(self._metrics)
        return os.fstat(self._metrics).st_size

    def rewind(self, size: int) -> None:
        """Cut metrics.jsonl to that length."""
        have = os.fstat(self._metrics).st_size
        if have < size:
            raise Refused(f"{self.metrics_path}: {have} bytes of {size}; accepted: the file as the run left it")
        os.ftruncate(self._metrics, size)

    def close(self) -> None:
        for board in (self._boards or {}).values():
            with suppress(OSError):  # a full disk: metrics.jsonl has it all, and the reason is already on its way
                board.close()
        os.close(self._metrics)
        os.close(self._lock)

    def without_tensorboard(self) -> None:
        self._boards = None

    def _board(self, line: dict) -> None:
        if self._boards is None:
            return
        policy, step = line.get("arm", line.get("policy")), line["step"]
        if policy not in self._boards:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:  # optional; the metrics are in metrics.jsonl
                self._boards = None
                return
            self._boards[policy] = SummaryWriter(self.path / "tensorboard" / policy, purge_step=step)
        for key, value in scalars(line):
            self._boards[policy].add_scalar(key, value, step)


def scalars(line: dict, prefix: str = ""):
    """(tag, value) of every float in a line, those of nested tables under "outer/inner"; histograms are left out."""
    for key, value in line.items():
        if isinstance(value, float):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict) and key != "histogram":
            yield from scalars(value, f"{prefix}{key}/")


def create(path: Path, config: dict) -> Run:
    """Begin a run in a new or empty directory.

    Raises:
        Refused: something is there already, or it cannot be written. What is there stays.
    """
    check_free(path, config)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = locked(path)
        checkpoint.replace(path / "config.json", json.dumps(config, indent=1).encode() + b"\n")
        return Run(path, config, lock, os.open(path / "metrics.jsonl", APPEND | os.O_CREAT | os.O_TRUNC, 0o644))
    except OSError as error:
        raise Refused(
            f"--out {path}: cannot be written ({error.strerror}); accepted: a new or empty directory"
        ) from None


def check_free(path: Path, config: dict, checkpoints: str = "checkpoints") -> None:
    """Raise Refused unless a run of this configuration may begin in that directory. One that never got to its first
    checkpoint may begin again."""
    if not path.exists():
        return
    if not path.is_dir():
        raise Refused(f"--out {path}: not a directory; accepted: a new or empty directory")
    if not any(path.iterdir()):
        return
    if not (path / "config.json").exists():
        raise Refused(f"--out {path}: the directory holds other files; accepted: a new or empty directory")
    there = read_config(path)
    differences = compare(there["run"], config["run"])
    if "data" in config:
        differences += compare({"digest": there["data"].get("digest")}, {"digest": config["data"]["digest"]}, "data.")
    if differences:
        what = f"holds a run of another configuration ({'; '.join(differences)})"
        raise Refused(f"--out {path}: {what}; accepted: a new or empty directory")
    if checkpoint.latest(path / checkpoints) is None:
        return
    raise Refused(f"--out {path}: holds this very run; to go on: --resume {path}; to begin again: another --out")


def reopen(path: Path) -> Run:
    """Open a run that exists. Raises Refused if there is none, or if another process has it."""
    config, lock = read_config(path), locked(path)
    try:
        return Run(path, config, lock, os.open(path / "metrics.jsonl", APPEND))
    except OSError as error:
        os.close(lock)
        what = f"metrics.jsonl cannot be opened ({error.strerror})"
        raise Refused(f"{path}: {what}; accepted: the directory as the run left it") from None


def read_config(path: Path) -> dict:
    """The config.json of a run directory. Raises Refused if it is none."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
        if not {"run", "data"} <= config.keys():
            raise ValueError("no 'run' or 'data' in it")
        return config
    except OSError as error:
        what = f"not a run directory: {file.name} cannot be read ({error.strerror})"
        raise Refused(f"{path}: {what}; accepted: the directory of a run") from None
    except (ValueError, AttributeError) as error:
        raise Refused(f"{file}: not the configuration of a run ({error}); accepted: the directory of a run") from None


def carry_on(path: Path, read: Callable, resume: Callable, begin: Callable):
    """What the run in `path` found: read, if it is done; else gone on with, or begun. Each is given the path."""
    if (path / "result.json").exists():
        return read(path)
    return (begin if checkpoint.latest(path / "checkpoints") is None else resume)(path)


@contextmanager
def settings(threads: int, devices: Sequence[int] = ()) -> Iterator[None]:
    """The process's number of threads, for the time of a run; torch's generators are afterwards as they were."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        torch.set_num_threads(before)


def read_metrics(path: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl; a last line that was cut off is left out."""
    text = (path / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def locked(path: Path) -> int:
    """A descriptor that holds the directory until it is closed. Raises Refused where another process has it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise Refused(f"{path}: another process is training in it; accepted: a run that nobody is working on") from None
    return fd
