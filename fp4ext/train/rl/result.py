"""What an RL run found: a row for each arm."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ..runs import result


@dataclass(frozen=True)
class Row:
    """One arm's outcome.

    Attributes:
        reward_before, reward_after: mean reward on the same prompts, at the start and after the last step.
        mean_abs_d, max_abs_d, kl: of trainer against sampler, over all steps (the largest for max_abs_d).
        ess: the smallest effective sample size of a step.
        weight_bits: bits an element of the sampler's converted weights.
        tokens_per_second: sampled, the median over steps.
        seconds: median time of a step.
        alarms: steps at which a measure was alarming.
        diverged: the step at which it stopped being finite.
    """

    arm: str
    reward_before: float | None
    reward_after: float | None
    mean_abs_d: float
    max_abs_d: float
    kl: float
    ess: float
    weight_bits: float
    tokens_per_second: float
    seconds: float
    alarms: int
    diverged: int | None


class Result(result.Result):
    """With a row for each arm."""

    row = Row


def table(arms: dict[str, float], metrics: list[dict]) -> tuple[Row, ...]:
    """A Row for each arm (name -> bits of its sampler's weights) from the metrics of the run."""
    rows = []
    for name, bits in arms.items():
        mine = [line for line in metrics if line["arm"] == name]
        steps = [line for line in mine if "rollout_corr/kl" in line]
        evaluations = [line["eval/reward"] for line in mine if "eval/reward" in line]
        column = lambda key, steps=steps: [line[key] for line in steps]  # noqa: E731
        rows.append(
            Row(
                arm=name,
                reward_before=evaluations[0] if evaluations else None,
                reward_after=evaluations[-1] if len(evaluations) > 1 else None,
                mean_abs_d=statistics.fmean(column("rollout_corr/mean_abs_d")),
                max_abs_d=max(column("rollout_corr/max_abs_d")),
                kl=statistics.fmean(column("rollout_corr/kl")),
                ess=min(column("rollout_corr/rollout_is_eff_sample_size")),
                weight_bits=bits,
                tokens_per_second=statistics.median(column("perf/tokens_per_second")),
                seconds=statistics.median(column("seconds")),
                alarms=sum(bool(line.get("alarms")) for line in mine),
                diverged=next((line["diverged"] for line in mine if "diverged" in line), None),
            )
        )
    return tuple(rows)
