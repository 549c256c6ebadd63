"""The errors that a caller may want to catch by type: a refused input, and a run that had to stop."""

from __future__ import annotations


class Refused(ValueError):
    """An input that cannot be used. The message names the argument, its value, and what would be accepted.

    It is raised before anything is computed or written. The command line prints the message and exits with 2; any other
    ValueError is a bug in fp4ext and keeps its traceback.
    """


class Stopped(RuntimeError):
    """A run that could not go on, for example because a disk is full.

    The message says what is intact and how to resume.
    """
