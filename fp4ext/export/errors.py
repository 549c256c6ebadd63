"""The refusal of a checkpoint or of a request, and how text that comes from a file is shown."""

from __future__ import annotations

import re

from ..errors import Refused

MOST = 1000  # characters of a message
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Invalid(Refused):
    """errors.Refused for messages that may quote a file: one line of at most MOST characters, all of them printable."""

    def __init__(self, message: str):
        super().__init__(shown(message, MOST))


def shown(text: str, most: int | None = None) -> str:
    """`text` made safe for a terminal: control characters are escaped.

    Args:
        most: characters to keep; the middle of a longer text gives way to "…". None: all.
    """
    text = _UNPRINTABLE.sub(lambda m: m[0].encode("unicode_escape").decode(), text)
    if most is not None and len(text) > most:
        head, tail = most * 2 // 3, most // 3
        text = f"{text[:head]}…{text[-tail:]}"
    return text
