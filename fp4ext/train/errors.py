"""The two ways a job ends early: an input that is refused, and a machine that gives out."""

from __future__ import annotations


class Refused(ValueError):
    """An input that cannot be used. The message names the argument, the value, and what would be accepted."""


class Stopped(RuntimeError):
    """A run that could not go on (a full disk, say). The message says what is intact and how to go on."""
