"""Read small files from untrusted sources: without blocking on a pipe, and without trusting a declared size."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MAX = 64_000_000  # bytes


def read(path: str | Path, most: int | None = MAX) -> bytes:
    """The contents of a regular file of at most `most` bytes (None: of any size).

    Raises:
        OSError: the file cannot be read, is a pipe, a device or a folder, or is larger than `most`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer would block
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"{found.st_size} bytes; accepted: at most {most}")
        return file.read()


def parse_json(data: bytes | str) -> Any:
    """Parse JSON strictly: no name may occur twice in an object, and NaN and Infinity are refused.

    Raises:
        ValueError: the text is not such JSON, or is nested too deep.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for name, value in pairs:
            if name in seen:
                raise ValueError(f"{name[:80]!r} is there twice")
            seen[name] = value
        return seen

    def constant(text: str) -> None:
        raise ValueError(f"{text} is no JSON number")

    try:
        text = data.decode() if isinstance(data, bytes) else data
        return json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
