"""Writing a checkpoint: shards of a bounded size, an index, JSON beside them; whole or not there.

Everything goes into a hidden folder beside the target, is synced, and takes the target's name in one step. A crash, a
full disk or Ctrl-C at any moment leaves what was there before.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .errors import Invalid
from .folder import INDEX, WEIGHTS

SHARD = 4 << 30  # bytes
_AT_FDCWD, _EXCHANGE = -100, 2  # renameat2 of Linux


class Writer:
    """`with Writer(folder) as w: w.add(name, tensor) …; w.files["config.json"] = …`; done when the block ends well.

    Args:
        target: a new or empty folder; with `overwrite`, also a checkpoint, which is replaced.
        shard: bytes after which a shard is closed. At most one shard's tensors are in memory.

    Raises:
        Refused: the target is taken, or cannot be written. OSError: the disk gave out; the target is as it was.
    """

    def __init__(self, target: str | Path, shard: int = SHARD, overwrite: bool = False):
        self.target, self.shard = Path(target), shard
        self.files: dict[str, dict] = {}
        self.copies: list[Path] = []
        self._metadata = {"format": "pt"}
        self.bytes = 0
        self._tensors: dict[str, Tensor] = {}
        self._names: set[str] = set()
        self._held = 0
        self._shards: list[list[str]] = []
        check_target(self.target, overwrite)
        self._found = _names(self.target) if overwrite else None

    def __enter__(self) -> Writer:
        try:
            _remove_dead(self.target)
            self.target.absolute().parent.mkdir(parents=True, exist_ok=True)
            self._aside = Path(
                tempfile.mkdtemp(prefix=f".{self.target.name}.writing-", dir=self.target.absolute().parent)
            )
        except OSError as error:
            raise Invalid(f"{self.target}: cannot be written ({error.strerror}); accepted: a new folder") from None
        os.chmod(self._aside, 0o755)
        self._lock = _locked(self._aside)
        return self

    def say(self, metadata: dict[str, str]) -> None:
        """Metadata of the tensor that comes next."""
        self._metadata |= metadata

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor more. Raises Refused for a name that is there already."""
        if name in self._names:
            raise Invalid(f"{self.target}: tensor {name!r} would be written twice; accepted: names that differ")
        if self._tensors and self._held + tensor.nbytes > self.shard:
            self._flush()
        self._names.add(name)
        self._tensors[name] = tensor.detach().cpu().contiguous()
        self._held += tensor.nbytes
        self.bytes += tensor.nbytes

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)

    def _flush(self) -> None:
        path = self._aside / f"shard-{len(self._shards)}"
        try:
            save_file(_own_storage(self._tensors), path, self._metadata)
        except SafetensorError as error:  # the library's word for a full disk
            raise OSError(f"{self.target}: cannot be written ({error})") from None
        os.chmod(path, 0o644)
        _sort_metadata(path)
        _sync(path)
        self._shards.append(list(self._tensors))
        self._tensors, self._held, self._metadata = {}, 0, {"format": "pt"}

    def _finish(self) -> None:
        self._flush()
        n = len(self._shards)
        names = [WEIGHTS] if n == 1 else [f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]
        for i, name in enumerate(names):
            os.rename(self._aside / f"shard-{i}", self._aside / name)
        if n > 1:
            weight_map = {t: name for name, shard in zip(names, self._shards, strict=True) for t in shard}
            self.files[INDEX] = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
        for name, value in self.files.items():
            (self._aside / name).write_text(json.dumps(value, indent=2) + "\n")
            _sync(self._aside / name)
        for path in self.copies:
            shutil.copyfile(path, self._aside / path.name)
            _sync(self._aside / path.name)
        _sync(self._aside)
        publish(self._aside, self.target, self._found)


def check_target(target: Path, overwrite: bool) -> None:
    """Raises Refused unless a checkpoint may be written there."""
    if not target.name:
        raise Invalid(f"{target}: not a name for a folder; accepted: a new or empty folder")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise Invalid(f"{target}: not a folder; accepted: a new or empty folder")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not any(target.glob("*.safetensors")):
        raise Invalid(f"{target}: holds other files; accepted: a new or empty folder, or a checkpoint with overwrite")
    if not overwrite:
        raise Invalid(f"{target}: holds a checkpoint; accepted: a new or empty folder, or this one with overwrite")


def check_room(target: Path, needed: int) -> None:
    """Raises Refused where the disk has no room for so many bytes beside what is there."""
    there = next(folder for folder in (target.absolute(), *target.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed:
        what = f"needs {needed:,} bytes beside what is there, and the disk has {free:,} free"
        raise Invalid(f"{target}: {what}; accepted: a disk with room")


def publish(aside: Path, target: Path, replaces: set[str] | None = None) -> None:
    """Give a finished folder its name.

    Args:
        aside: the folder, on the target's file system.
        target: its name from now on. An empty folder of that name gives way.
        replaces: the names in the checkpoint that it replaces, which is then removed; None where it replaces none.

    Raises:
        Refused: something else has appeared in the target since it was looked at. It is kept.
    """
    if replaces:
        _swap(aside, target)
        if _names(aside) != replaces:
            _swap(aside, target)
            raise Invalid(f"{target}: was changed while the new checkpoint was written; accepted: a folder at rest")
        shutil.rmtree(aside, ignore_errors=True)
    else:
        try:
            os.rename(aside, target)  # the system refuses to put it over a folder that is not empty
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise Invalid(f"{target}: appeared while it was written; accepted: a new or empty folder") from None
    _sync(target.absolute().parent)


def _swap(aside: Path, target: Path) -> None:
    """Exchange the names of two folders."""
    if not _exchange(aside, target):  # a file system without the exchange: three steps, the first two reversible
        old = aside.with_name(f"{aside.name}.old")
        os.rename(target, old)
        try:
            os.rename(aside, target)
        except OSError:
            os.rename(old, target)
            raise
        os.rename(old, aside)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _locked(folder: Path) -> int | None:
    """A descriptor that marks a folder as in use, until its process ends; None where it is another's."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _remove_dead(target: Path) -> None:
    """Remove what writers that were killed have left beside the target."""
    name = target.absolute().name
    for left in target.absolute().parent.glob(f".{glob.escape(name)}.writing-????????"):
        fd = _locked(left) if left.is_dir() and not left.is_symlink() else None
        if fd is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(fd)


def _sort_metadata(path: Path) -> None:
    """Put the metadata's entries in order: the library's own order is random, and files should repeat byte for byte."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header = {"__metadata__": dict(sorted(header.pop("__metadata__").items()))} | header
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > length:
            raise OSError(f"{path}: its header cannot be sorted in place")
        file.seek(8)
        file.write(text.ljust(length))


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders' names in one step, where the system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b.absolute()), _EXCHANGE) == 0


def _own_storage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The library refuses tensors that share memory; those (tied weights, rows of one tensor) get copies."""
    seen, out = set(), {}
    for name, t in tensors.items():
        place = t.untyped_storage().data_ptr()
        out[name] = t.clone() if place in seen and t.numel() else t
        seen.add(place)
    return out


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
