"""For as long as one asks: how the fuzz tests (`make fuzz`, `pytest -m fuzz`) take their time and their seeds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

SECONDS = "FP4EXT_FUZZ_SECONDS"  # how long each fuzz test runs
SEED = "FP4EXT_FUZZ_SEED"  # the first seed; default: another one each time


def rounds(default: float = 10) -> Iterator[int]:
    """Seeds, one a round, until FP4EXT_FUZZ_SECONDS (or the default) have passed; at least one.

    Raises ValueError for an environment variable that is no number.
    """
    seed = int(os.environ.get(SEED) or time.time_ns() % 10**12)
    end = time.monotonic() + float(os.environ.get(SECONDS) or default)
    while True:
        print(f"fuzz: {SEED}={seed}", flush=True)  # pytest shows it where a test fails
        yield seed
        seed += 1
        if time.monotonic() >= end:
            return
