"""Ctrl-C between two steps instead of inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable


class Interrupts:
    """Ctrl-C and SIGTERM ask the loop to stop after its step; a second one stops at once.

    `signal` is the number that asked. Outside the main thread, where Python delivers no signals, nothing changes.
    """

    signal: int | None = None

    def __init__(self, tell: Callable[[str], None]):
        self.tell = tell

    def __enter__(self):
        self._old = {}
        if threading.current_thread() is threading.main_thread():
            self._old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number, frame):
        self.signal = number
        self._restore()
        self.tell("stopping after this step; once more stops at once")

    def _restore(self):
        for s, handler in self._old.items():
            signal.signal(s, handler)

    def __exit__(self, *error):
        self._restore()
