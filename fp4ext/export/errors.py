"""What is said of a checkpoint, or of a request, that cannot be taken; and how a stranger's words are shown."""

from __future__ import annotations

import re

from .. import errors

MOST = 1000  # characters of a message
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Refused(errors.Refused):
    """An input that cannot be used. The message names the file and tensor, what it is, and what would be accepted."""

    def __init__(self, message: str):
        super().__init__(shown(message, MOST))


def shown(text: str, most: int | None = None) -> str:
    """Text that may come from a stranger, safe for a terminal: control characters escaped, the middle left out."""
    text = _UNPRINTABLE.sub(lambda m: m[0].encode("unicode_escape").decode(), text)
    if most is not None and len(text) > most:
        head, tail = most * 2 // 3, most // 3
        text = f"{text[:head]}…{text[-tail:]}"
    return text
