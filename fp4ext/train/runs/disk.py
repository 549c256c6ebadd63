"""Files that are whole or not there, on a disk that may fill up or lose its power.

What these functions return from is on the disk: a file's bytes, and its name in its folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp4ext.errors import Stopped


def write(path: Path, data: bytes) -> None:
    """Write a file and wait until its bytes are on the disk. Its name is there once its folder is synced."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        put(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def put(fd: int, data: bytes) -> None:
    """Write all of the data to an open file."""
    while data:
        data = data[os.write(fd, data) :]


def replace(path: Path, data: bytes) -> None:
    """Write a file aside and rename it: readers see the old one or the new one."""
    aside = beside(path)
    try:
        write(aside, data)
        os.rename(aside, path)
        sync(path.parent)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def beside(path: Path) -> Path:
    """Where `replace` writes a file before it has its name; a killed process may leave it."""
    return path.with_name(f".{path.name}.writing")


def make_folder(path: Path) -> None:
    """Make a folder and those above it, if they are not there."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def told(what: str, kept: Path | None) -> Iterator[None]:
    """Turn an OSError while writing `what` into Stopped, which says what is intact."""
    try:
        yield
    except OSError as error:
        intact = f"intact: {kept}" if kept else "no checkpoint had been written before"
        raise Stopped(f"{what} could not be written: {error.strerror or error}; {intact}") from error
