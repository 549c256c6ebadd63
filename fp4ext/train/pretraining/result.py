"""What pretraining found: a row for each policy."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

from ..runs import result


@dataclass(frozen=True)
class Row:
    """One policy's outcome.

    Attributes:
        start_loss, final_loss: validation loss in nats a byte, before the first step and after the last; None where
            not finite.
        gap: final_loss - BF16's, in mnat; None without a BF16 arm.
        gap_error: standard error of the gap over the validation windows (paired, this one seed), in mnat.
        weight_bits, activation_bits: bits per stored element, where a product reads it, and where it waits for
            backward.
        seconds: median time of a step.
        diverged: the step at which it stopped being finite.
        converted: how many modules the policy took.
        left: Linear -> why it stayed BF16.
        load_max, load_min: tokens of the busiest and of the idlest expert over an even share, in the worst layer, on
            average over the last tenth of the logged steps; None for a dense model.
    """

    policy: str
    start_loss: float | None
    final_loss: float | None
    gap: float | None
    gap_error: float | None
    weight_bits: float
    activation_bits: float
    seconds: float | None
    diverged: int | None
    converted: int
    left: dict[str, str]
    load_max: float | None = None
    load_min: float | None = None


class Result(result.Result):
    """With a row for each policy."""

    row = Row


def table(arms, losses: dict[str, np.ndarray], metrics: list[dict]) -> tuple[Row, ...]:
    """A Row for each arm, from its losses over the final windows and the metrics of the run."""
    base = losses.get("bf16")
    rows = []
    for arm in arms:
        mine = [line for line in metrics if line["policy"] == arm.policy]
        seconds = [line["seconds"] for line in mine if "seconds" in line]
        gap = gap_error = None
        if base is not None:
            difference = 1e3 * (losses[arm.policy] - base)
            gap, gap_error = (
                _finite(difference.mean()),
                _finite(difference.std(ddof=1) / math.sqrt(len(difference))) if len(base) > 1 else None,
            )
        bits = arm.storage_bits()
        loads = [(line["load_max"], line["load_min"]) for line in mine if "load_max" in line]
        last = loads[-max(1, len(loads) // 10) :]
        rows.append(
            Row(
                policy=arm.policy,
                start_loss=next((line.get("valid_loss") for line in mine if line["step"] == 0), None),
                final_loss=_finite(losses[arm.policy].mean()),
                gap=gap,
                gap_error=gap_error,
                weight_bits=bits["weights"],
                activation_bits=bits["saved_activations"],
                seconds=statistics.median(seconds) if seconds else None,
                diverged=arm.diverged,
                converted=len(arm.report.converted),
                left=dict(arm.report.left),
                load_max=statistics.fmean(most for most, _ in last) if last else None,
                load_min=statistics.fmean(least for _, least in last) if last else None,
            )
        )
    return tuple(rows)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
