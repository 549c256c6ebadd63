"""Small files that anybody may have written: read as data, without waiting for a pipe or believing a size."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

MAX = 64_000_000  # bytes


def read(path: str | Path, most: int | None = MAX) -> bytes:
    """The contents of a regular file of at most so many bytes (None: of any size).

    Raises:
        OSError: it cannot be read, is a pipe, a device or a folder, or is larger.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer would block
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"{found.st_size} bytes; accepted: at most {most}")
        return file.read()


def parse_json(data: bytes | str):
    """JSON without its traps: no name twice in an object, no NaN, no depth that overflows.

    Raises:
        ValueError: what is wrong.
    """

    def once(pairs):
        seen = dict(pairs)
        if len(seen) != len(pairs):
            before: set[str] = set()
            twice = next(name for name, _ in pairs if name in before or before.add(name))
            raise ValueError(f"{twice[:80]!r} is there twice")
        return seen

    def constant(text):
        raise ValueError(f"{text} is no JSON number")

    try:
        text = data.decode() if isinstance(data, bytes) else data
        return json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
