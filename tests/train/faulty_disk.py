"""A disk that fails, for whatever is written under a folder through Python's `os`.

`with FaultyDisk(folder, at=7, mode="power") as disk: work()` counts the operations of `work` under the folder and lets
the one numbered `at` fail:

    once     it raises OSError, and the following ones do not
    full     it and all that follow raise OSError, but for removals: no space is left
    kill     the process ends before it (Death); all that was written is there
    torn     the same; of a file's bytes that were not synced, the first half is there
    power    the same; only synced bytes are there, and only names whose folder was synced

After Death, `disk.restart()` makes the folder what the disk still has.
"""

import errno
import os
import shutil
from pathlib import Path

WATCHED = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "ftruncate")
FREEING = ("unlink", "rmdir", "ftruncate")
MODES = ("once", "full", "kill", "torn", "power")


class Death(BaseException):
    """Of the process."""


class FaultyDisk:
    def __init__(self, folder: Path, at: int | None = None, mode: str = "once"):
        folder.mkdir(exist_ok=True)
        self.folder, self.at, self.mode, self.count = folder, at, mode, 0
        self.operations: list[str] = []
        self.real = {name: getattr(os, name) for name in WATCHED}
        # By inode: what is on the disk. Open descriptors keep the inodes from being used again.
        self.bytes: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.kept: dict[int, int] = {}

    def __enter__(self):
        self._keep(self.folder)
        self.names[os.stat(self.folder).st_ino] = {}
        for name in WATCHED:
            setattr(os, name, lambda *args, _name=name, **more: self._call(_name, *args, **more))
        return self

    def __exit__(self, *error):
        for name, call in self.real.items():
            setattr(os, name, call)

    def _call(self, name: str, *args, **more):
        path = self._path(args[0])
        reads = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR)
        if path is None or reads or (path != self.folder and self.folder not in path.parents):
            return self.real[name](*args, **more)
        self.count += 1
        self.operations.append(f"{name} {path.relative_to(self.folder)}")
        if self.at is not None and self.count >= self.at:
            if self.mode in ("kill", "torn", "power"):
                raise Death(self.operations[-1])
            if self.count == self.at or (self.mode == "full" and name not in FREEING):
                raise OSError(errno.ENOSPC, "No space left on device")
        if name == "fsync":  # what the disk has is kept here, so the real one need not be waited for
            return self._synced(args[0])
        result = self.real[name](*args, **more)
        if name == "open":
            self._keep(path)
        return result

    def _path(self, place) -> Path | None:
        if not isinstance(place, int):
            return Path(place).absolute()
        found = os.readlink(f"/proc/self/fd/{place}")
        return Path(found.removesuffix(" (deleted)")) if found.startswith("/") else None

    def _keep(self, path: Path) -> None:
        fd = self.real["open"](path, os.O_RDONLY)
        inode = os.fstat(fd).st_ino
        if inode in self.kept:
            os.close(fd)
        self.kept.setdefault(inode, fd)

    def _synced(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        path = f"/proc/self/fd/{fd}"
        if os.path.isdir(path):
            self._keep(Path(path).resolve())
            self.names[inode] = {}
            for entry in os.scandir(path):
                self._keep(Path(path).resolve() / entry.name)
                self.names[inode][entry.name] = entry.inode()
        else:
            self._keep(Path(path).resolve())
            self.bytes[inode] = Path(path).read_bytes()

    def restart(self) -> None:
        """Make the folder what the disk still has of it."""
        if self.mode == "torn":
            for path in (p for p in self.folder.rglob("*") if p.is_file()):
                now, safe = path.read_bytes(), self.bytes.get(path.stat().st_ino, b"")
                if now != safe and now.startswith(safe):
                    path.write_bytes(now[: len(safe) + (len(now) - len(safe)) // 2])
        elif self.mode == "power":
            root, aside = os.stat(self.folder).st_ino, self.folder.with_name(f"{self.folder.name}.restarted")
            self._rebuild(root, aside)
            shutil.rmtree(self.folder)
            os.rename(aside, self.folder)
        for fd in self.kept.values():
            os.close(fd)
        self.kept.clear()

    def _rebuild(self, inode: int, path: Path) -> None:
        if os.path.isdir(f"/proc/self/fd/{self.kept[inode]}") or inode in self.names:
            path.mkdir()
            for name, inner in self.names.get(inode, {}).items():
                self._rebuild(inner, path / name)
        else:
            path.write_bytes(self.bytes.get(inode, b""))
