"""What a person sees while RL goes on: bars on a terminal, lines elsewhere, nothing from Python."""

from __future__ import annotations

import time
from pathlib import Path

from ..runs import display
from ..runs.display import clock, headline, say
from .result import Result, Row

MEASURES = ("critic/rewards/mean", "rollout_corr/mean_abs_d", "rollout_corr/rollout_is_eff_sample_size", "seconds")


class Lines(display.Silent):
    """Plain lines at most every ten seconds, and at every evaluation: for logs and pipes."""

    def __init__(self, write=say, every: float = 10.0):
        self.write, self.every = write, every

    def pretraining(self):
        return display.Lines(self.write, self.every)

    def start(self, arms, start: int, steps: int, out: Path) -> None:
        self.first, self.steps, self.began, self.last = start, steps, time.monotonic(), 0.0
        self.write(f"{headline(arms, start, steps)} → {out}")

    def step(self, done: int, lines: list[dict]) -> None:
        now = time.monotonic()
        if "eval/reward" in lines[0]:
            rewards = "  ".join(f"{line['arm']} {line['eval/reward']:.3f}" for line in lines)
            self.write(f"step {done}/{self.steps}  reward on the evaluation's prompts: {rewards}")
            return
        if now - self.last < self.every:
            return
        self.last = now
        left = clock((now - self.began) / max(1, done - self.first) * (self.steps - done))
        self.write(f"step {done}/{self.steps}  reward: {'  '.join(map(_short, lines))}  {left} left")

    def note(self, text: str) -> None:
        self.write(text)


class Bars(display.Bars):
    """A progress bar and, below it, a row for each arm: reward, disagreement, effective sample size, time."""

    def pretraining(self):
        return display.Bars(self.console)

    def step(self, done: int, lines: list[dict]) -> None:
        for line in lines:
            arm = self.arms[line["arm"]]
            for key in MEASURES:
                if line.get(key) is not None:
                    arm[key] = line[key] if key not in arm else 0.8 * arm[key] + 0.2 * line[key]
            for key in ("eval/reward", "rollout_corr/max_abs_d", "diverged"):
                if key in line:
                    arm[key] = max(line[key], arm.get(key, 0)) if key.endswith("max_abs_d") else line[key]
        self.progress.update(self.task, completed=done)
        self.live.update(self._drawn())

    def _view(self):
        from rich.console import Group
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("arm", "evaluated", "reward", "mean |d|", "max |d|", "ESS", "s/step"):
            table.add_column(heading, justify="left" if heading == "arm" else "right", header_style="dim")
        for name, arm in self.arms.items():
            cell = lambda key, form, arm=arm: format(arm[key], form) if key in arm else "–"  # noqa: E731
            reward = f"diverged at {arm['diverged']}" if arm.get("diverged") else cell("critic/rewards/mean", ".3f")
            table.add_row(
                name,
                cell("eval/reward", ".3f"),
                reward,
                cell("rollout_corr/mean_abs_d", ".2g"),
                cell("rollout_corr/max_abs_d", ".2g"),
                cell("rollout_corr/rollout_is_eff_sample_size", ".3f"),
                cell("seconds", ".2f"),
            )
        return Group(self.progress, table)


HEADINGS = (  # name, unit, and both on a terminal
    ("arm", "", "arm"),
    ("reward before", "of 1", "reward\nbefore"),
    ("reward after", "of 1", "reward\nafter"),
    ("mean |d|", "nat", "mean|d|\nnat"),
    ("max |d|", "nat", "max|d|\nnat"),
    ("KL", "nat", "KL\nnat"),
    ("ESS", "least share", "least\nESS"),
    ("weights", "bit/element", "weight\nbits"),
    ("sampling", "token/s", "token\n/s"),
    ("time", "s/step", "time\ns/step"),
)


def cells(row: Row) -> tuple[str, ...]:
    """A Row as text, in the order of HEADINGS."""
    reward = lambda value: "–" if value is None else f"{value:.3f}"  # noqa: E731
    after = f"diverged at step {row.diverged}" if row.diverged is not None else reward(row.reward_after)
    d = lambda value: "0" if value == 0 else f"{value:.2g}"  # noqa: E731
    return (
        row.arm,
        reward(row.reward_before),
        after,
        d(row.mean_abs_d),
        d(row.max_abs_d),
        d(row.kl),
        f"{row.ess:.3f}",
        f"{row.weight_bits:.2f}",
        f"{row.tokens_per_second:.0f}",
        f"{row.seconds:.2f}",
    )


def final_table(result: Result, console) -> None:
    """Print the outcome and where the report is."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for name, _, heading in HEADINGS:
        table.add_column(heading, justify="left" if name == "arm" else "right")
    for row in result.rows:
        table.add_row(*cells(row))
    console.print(table)
    console.print(f"report: {result.report}", highlight=False, soft_wrap=True)


def _short(line: dict) -> str:
    if "critic/rewards/mean" not in line:
        return f"{line['arm']} diverged at {line['diverged']}"
    return f"{line['arm']} {line['critic/rewards/mean']:.3f} (|d| {line['rollout_corr/mean_abs_d']:.2g})"
