"""The errors that a caller may want to catch by type: an input that is refused, and a run that could not go on."""

from __future__ import annotations


class Refused(ValueError):
    """An input that cannot be used. The message names the argument, its value, and what would be accepted.

    Nothing was computed and nothing was written. The command line prints the message and exits with 2; any other
    ValueError is an error of fp4ext's own, and keeps its traceback.
    """


class Stopped(RuntimeError):
    """A run that could not go on, because a disk is full, say. The message says what is intact and how to resume."""
