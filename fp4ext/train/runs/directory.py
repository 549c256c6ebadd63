"""A run directory: everything that a run leaves behind, and what it needs to go on.

    config.json     what was asked for, which text, which versions; enough to repeat the run
    metrics.jsonl   a line for each policy (or arm of RL) and logged step
    checkpoints/    the newest step (checkpoint.py)
    tensorboard/    the metrics once more, a folder for each policy, if tensorboard is installed
    result.json, report.html, loss.png     at the end

config.json, result.json and a checkpoint's manifest have digests (digest.py). The manifest and result.json have that of
metrics.jsonl too, as it was then, and the manifest that of config.json. Resuming cuts metrics.jsonl where the
checkpoint saw its end, so that what follows is written once. What is not as it was written is refused by its name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import torch

from fp4ext import files
from fp4ext.errors import Refused

from . import checkpoint, digest, disk
from .config import compare

APPEND = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"


class Run:
    """An open run directory, locked against a second process: `with create(…)` or `with reopen(…)`."""

    def __init__(self, path: Path, config: dict, lock: int, metrics: int):
        self.path, self.config = path, config
        self._lock, self._metrics = lock, metrics
        self._size, self._digest = 0, blake2b(digest_size=16)  # of metrics.jsonl
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
        return self.path / METRICS

    def log(self, lines: list[dict]) -> None:
        """Append lines to metrics.jsonl and to TensorBoard."""
        data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        with disk.told(METRICS, kept=checkpoint.latest(self.checkpoints)):
            disk.put(self._metrics, data)
        self._size += len(data)
        self._digest.update(data)
        for line in lines:
            self._board(line)

    def mark(self) -> dict:
        """Length and digest of metrics.jsonl, once all of it is on the disk: for a manifest or result.json."""
        with disk.told(METRICS, kept=checkpoint.latest(self.checkpoints)):
            os.fsync(self._metrics)
        return {"bytes": self._size, "blake2": self._digest.hexdigest()}

    def save(self, step: int, arms: Sequence) -> None:
        """Write a checkpoint of all arms: their `files()`, and the step at which one diverged."""
        facts = {"config": self.config["digest"], "metrics": self.mark()}
        facts["diverged"] = {arm.policy: arm.diverged for arm in arms}
        checkpoint.save(self.checkpoints, step, (file for arm in arms for file in arm.files()), facts)

    def load(self, arms: Sequence) -> int:
        """Put the arms where the newest checkpoint has them, and metrics.jsonl too. Returns its step; 0 for a run that
        never got to its first one.

        Raises:
            Refused: the checkpoint is missing or damaged, or does not fit config.json or metrics.jsonl.
        """
        if checkpoint.latest(self.checkpoints) is None:
            _check_unbegun(self.path)
            return 0
        manifest, found = newest(self.path, self.config)
        with fitting(self.path):
            for arm in arms:
                arm.load(found, manifest["diverged"])
        self._rewind(manifest["metrics"])
        checkpoint.drop_older(self.checkpoints)  # it may have been killed before it did
        return manifest["step"]

    def _rewind(self, mark: dict) -> None:
        """Cut metrics.jsonl to what a checkpoint saw of it. The run is not done from now on."""
        data = _begin_of(self.metrics_path, mark)
        with disk.told(METRICS, kept=checkpoint.latest(self.checkpoints)):
            (self.path / RESULT).unlink(missing_ok=True)
            disk.sync(self.path)
            os.ftruncate(self._metrics, len(data))
        self._size, self._digest = len(data), blake2b(data, digest_size=16)

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
    lock = None
    try:
        disk.make_folder(path)
        lock = locked(path)
        check_free(path, config)  # nobody else has begun one meanwhile
        config = write_config(path, config)
        return Run(path, config, lock, _metrics(path, os.O_CREAT | os.O_TRUNC))
    except BaseException as error:
        if lock is not None:
            os.close(lock)
        if not isinstance(error, OSError):
            raise
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
    if {p.name for p in path.iterdir()} <= {disk.beside(path / CONFIG).name}:  # killed before its first file was whole
        return
    if not (path / CONFIG).exists():
        raise Refused(f"--out {path}: the directory holds other files; accepted: a new or empty directory")
    there = read_config(path)
    differences = compare(there["run"], config["run"])
    if "data" in config:
        differences += compare({"digest": there["data"]["digest"]}, {"digest": config["data"]["digest"]}, "data.")
    if differences:
        what = f"holds a run of another configuration ({'; '.join(differences)})"
        raise Refused(f"--out {path}: {what}; accepted: a new or empty directory")
    if checkpoint.latest(path / checkpoints) is None:
        _check_unbegun((path / checkpoints).parent)
        return
    raise Refused(f"--out {path}: holds this very run; to go on: --resume {path}; to begin again: another --out")


def reopen(path: Path) -> Run:
    """Open a run that exists. Raises Refused if there is none, or if another process has it."""
    config, lock = read_config(path), locked(path)
    new = os.O_CREAT if checkpoint.latest(path / "checkpoints") is None else 0  # it was killed before it made the file
    try:
        return Run(path, config, lock, _metrics(path, new))
    except BaseException as error:
        os.close(lock)
        if not isinstance(error, OSError):
            raise
        what = f"metrics.jsonl cannot be opened ({error.strerror})"
        raise Refused(f"{path}: {what}; accepted: the directory as the run left it") from None


def _metrics(path: Path, flags: int) -> int:
    """metrics.jsonl, opened for lines; its name is on the disk."""
    fd = os.open(path / METRICS, APPEND | flags, 0o644)
    try:
        disk.sync(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_config(path: Path, config: dict) -> dict:
    """Write config.json. Returns what it says: the configuration and its digests."""
    data = digest.dumps(config, one_by_one=True)
    disk.replace(path / CONFIG, data)
    return json.loads(data)


def read_config(path: Path) -> dict:
    """The config.json of a run directory. Raises Refused if it is none, or not as the run wrote it."""
    file = path / CONFIG
    if not file.exists():
        raise Refused(f"{path}: not a run directory: no {CONFIG} in it; accepted: the directory of a run")
    config = digest.read(file)

    def check(name: str, value, kind: type, inner: type | None = None) -> None:
        if not isinstance(value, kind) or (inner and not all(isinstance(v, inner) for v in value)):
            said = "no configuration of a run"
            raise Refused(f"{file}: {said}: {name} is {value!r}; accepted: the file as the run wrote it")

    for key, kind in (("run", dict), ("data", dict), ("facts", dict), ("command", str)):
        check(key, config.get(key), kind)
    data = config["data"]
    check("data.digest", data.get("digest"), str)
    if "policies" in config["run"] and "arms" not in config["run"]:
        check("data.paths", data.get("paths"), list, str)
        check("data.source", data.get("source"), str)
    if "start" in data:
        check("data.start", data["start"], dict)
    return config


def newest(path: Path, config: dict, only: Sequence[str] | None = None) -> tuple[dict, checkpoint.Files]:
    """Manifest and files of a run's newest checkpoint (checkpoint.load), which its config.json belongs to."""
    manifest, found = checkpoint.load(path / "checkpoints", only)
    step = checkpoint.latest(path / "checkpoints")
    for key in ("config", "metrics", "diverged"):
        if key not in manifest:
            raise Refused(f"{step}: {checkpoint.MANIFEST} has no {key}; accepted: the checkpoint of a run")
    if manifest["config"] != config["digest"]:
        what = f"not the one that {step / checkpoint.MANIFEST} was written under"
        raise Refused(f"{path / CONFIG}: {what}; accepted: both as the run left them")
    return manifest, found


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Refuse a checkpoint whose files do not fit the models that config.json makes."""
    try:
        yield
    except (KeyError, RuntimeError, AttributeError) as error:
        what = f"the checkpoint does not fit config.json ({' '.join(str(error).split())})"
        raise Refused(f"{path}: {what}; accepted: both as the run left them") from None


def _check_unbegun(path: Path) -> None:
    """Raise Refused where a run without a checkpoint had one: the first is written before the first line."""
    file = path / METRICS
    if file.exists() and file.stat().st_size:
        what = f"no checkpoint in {path / 'checkpoints'}, but {METRICS} has lines"
        raise Refused(f"{path}: {what}; accepted: the directory as the run left it")


def finish(directory: Run, done, report: Callable) -> None:
    """Write the report and, last, result.json: where it is, the run is done."""
    with disk.told("the report", kept=checkpoint.latest(directory.checkpoints)):
        report(directory.path, done)
        disk.replace(directory.path / RESULT, digest.dumps(done.to_json() | {"metrics": directory.mark()}))


def carry_on(path: Path, read: Callable, resume: Callable, begin: Callable):
    """What the run in `path` found: read, if it is done; else gone on with, or begun. Each is given the path."""
    if (path / RESULT).exists():
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
    """The lines of a run's metrics.jsonl; a last line that was cut off is left out.

    Raises:
        Refused: it is missing, not what result.json or the newest checkpoint saw, or has a line that is none.
    """
    file, step = path / METRICS, checkpoint.latest(path / "checkpoints")
    mark = {"bytes": 0, "blake2": blake2b(digest_size=16).hexdigest()}
    if (path / RESULT).exists():
        mark = digest.read(path / RESULT).get("metrics", mark)
    elif step:
        mark = checkpoint.manifest(step).get("metrics", mark)
    data = _begin_of(file, mark, whole=True)
    found = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            value = files.parse_json(line)
            if not isinstance(value, dict) or type(value.get("step")) is not int:
                raise ValueError("no step in it")
        except ValueError as error:
            raise Refused(f"{file}: line {number} is none ({error}); accepted: the file as the run left it") from None
        found.append(value)
    return found


def _begin_of(file: Path, mark: dict, whole: bool = False) -> bytes:
    """What a `mark` saw of metrics.jsonl, or the `whole` file, once that is as it was. Raises Refused otherwise."""
    try:
        data, size = files.read(file, most=None), mark["bytes"]
        if len(data) < size:
            raise OSError(errno.EIO, f"{len(data)} bytes of {size}")
        if digest.of(data[:size]) != mark["blake2"]:
            raise OSError(errno.EIO, f"its first {size} bytes are not what was written")
        return data if whole else data[:size]
    except (OSError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "its length and digest are not known"
        raise Refused(f"{file}: {reason}; accepted: the file as the run left it") from None


def locked(path: Path) -> int:
    """A descriptor that holds the directory until it is closed. Raises Refused where another process has it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise Refused(f"{path}: another process is training in it; accepted: a run that nobody is working on") from None
    return fd
