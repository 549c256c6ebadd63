"""The loop of a job: step after step, a checkpoint now and then, and a stop between two steps on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .directory import Run
from .interrupt import Interrupts


def advance(
    run: Run, arms: Sequence, steps: range, save_every: int, take: Callable[[int], list[dict]], show
) -> tuple[int, int | None]:
    """Take the steps, save all arms at every `save_every`-th, at the last one and where a signal asks to stop.

    Args:
        steps: those that are left; the last one ends the run.
        take: step (from 0) → the metrics lines of all arms, which it has logged.

    Returns:
        The number of steps done, and the signal that asked to stop, if any.
    """
    done = steps.start
    with Interrupts(show.note) as stop:
        for step in steps:
            lines, done = take(step), step + 1
            show.step(done, lines)
            if done % save_every == 0 or done == steps.stop or stop.signal:
                run.save(done, arms)
            if stop.signal:
                break
    return done, stop.signal
