"""What is said of a checkpoint, or of a request, that cannot be taken."""

from __future__ import annotations


class Refused(ValueError):
    """An input that cannot be used. The message names the file and tensor, what it is, and what would be accepted."""
