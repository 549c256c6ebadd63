"""What a person sees while a run goes on: bars on a terminal, lines elsewhere, nothing from Python."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from .result import Result

say = partial(print, flush=True)  # into a file or a pipe, too, while the run goes on


class Silent:
    """The interface, doing nothing. `step` gets the metrics lines of all arms after each step."""

    def start(self, arms, start: int, steps: int, out: Path) -> None: ...

    def step(self, done: int, lines: list[dict]) -> None: ...

    def note(self, text: str) -> None: ...

    def pretraining(self) -> Silent:
        """The display of a pretraining that comes before another job."""
        return Silent()

    def close(self) -> None: ...


class Lines(Silent):
    """Plain lines, one for each evaluation and at most every ten seconds: for logs and pipes."""

    def __init__(self, write=say, every: float = 10.0):
        self.write, self.every = write, every

    def start(self, arms, start: int, steps: int, out: Path) -> None:
        self.first, self.steps, self.began, self.last = start, steps, time.monotonic(), 0.0
        self.write(f"{headline(arms, start, steps)} → {out}")

    def step(self, done: int, lines: list[dict]) -> None:
        now = time.monotonic()
        evaluated = "valid_loss" in lines[0]
        if not evaluated and now - self.last < self.every:
            return
        self.last = now
        word = "valid" if evaluated else "train"
        losses = "  ".join(f"{line['policy']} {_loss(line, word)}" for line in lines)
        left = ""
        if done > self.first:
            left = f"  {clock((now - self.began) / (done - self.first) * (self.steps - done))} left"
        self.write(f"step {done}/{self.steps}  {word} loss: {losses}{left}")

    def note(self, text: str) -> None:
        self.write(text)


class Bars(Silent):
    """A progress bar and, below it, a row for each arm: training loss (smoothed), validation loss, gap to BF16.

    above: what is drawn over them, of a job that this is a stage of; all of it then goes when the stage is over.
    """

    def __init__(self, console, above=None):
        self.console, self.above = console, above

    def start(self, arms, start: int, steps: int, out: Path) -> None:
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.console.print(f"{headline(arms, start, steps)} → {out}", highlight=False)
        self.progress = Progress(
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("·"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
        )
        self.task = self.progress.add_task("", total=steps, completed=start)
        self.arms = {a.policy: {"policy": a.policy} for a in arms}
        transient = self.above is not None
        self.live = Live(self._drawn(), console=self.console, refresh_per_second=4, transient=transient)
        self.live.start()

    def step(self, done: int, lines: list[dict]) -> None:
        for line in lines:
            arm = self.arms[line["policy"]]
            for key in ("train_loss", "seconds"):
                if line.get(key) is not None:
                    arm[key] = line[key] if key not in arm else 0.9 * arm[key] + 0.1 * line[key]
            arm.update({key: line[key] for key in ("valid_loss", "diverged") if key in line})
        self.progress.update(self.task, completed=done)
        self.live.update(self._drawn())

    def note(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False)

    def close(self) -> None:
        if hasattr(self, "live"):
            self.live.stop()

    def _drawn(self):
        from rich.console import Group

        return self._view() if self.above is None else Group(self.above, self._view())

    def _view(self):
        from rich.console import Group
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("policy", "train loss", "valid loss", "gap, mnat", "s/step"):
            table.add_column(heading, justify="left" if heading == "policy" else "right", header_style="dim")
        base = self.arms.get("bf16", {}).get("valid_loss")
        for name, arm in self.arms.items():
            valid = arm.get("valid_loss")
            gap = f"{1e3 * (valid - base):+.1f}" if valid is not None and base is not None and name != "bf16" else ""
            seconds = f"{arm['seconds']:.2f}" if "seconds" in arm else ""
            table.add_row(name, _loss(arm, "train"), _loss(arm, "valid"), gap, seconds)
        return Group(self.progress, table)


def headline(arms, start: int, steps: int) -> str:
    parameters = sum(p.numel() for p in arms[0].model.parameters())
    begin = f"from step {start} to {steps}" if start else f"{steps} steps"
    return f"{len(arms)} × {parameters / 1e6:.2f} M parameters, {begin}"


def final_table(result: Result, console) -> None:
    """Print the outcome and where the report is."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = (
        "policy",
        "valid loss\nnat/byte",
        "gap to bf16\nmnat",
        "weights\nbit/element",
        "saved act.\nbit/element",
        "time\ns/step",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in result.rows:
        table.add_row(*cells(row)[: len(headings)])
    console.print(table)
    loads = [f"{row.policy} {cells(row)[-1]}" for row in result.rows if row.load_max is not None]
    if loads:
        console.print(f"expert load, × an even share: {', '.join(loads)}", highlight=False)
    console.print(f"report: {result.report}", highlight=False, soft_wrap=True)


def cells(row) -> tuple[str, ...]:
    """A Row as text: policy, loss, gap, weight bits, activation bits, seconds; with experts, their load."""
    gap = "–"
    if row.gap is not None and row.policy != "bf16":
        gap = f"{row.gap:+.1f}" + (f" ± {row.gap_error:.1f}" if row.gap_error is not None else "")
    loss = "not finite" if row.final_loss is None else f"{row.final_loss:.4f}"
    if row.diverged is not None:
        loss = f"diverged at step {row.diverged}"
    seconds = "–" if row.seconds is None else f"{row.seconds:.3f}"
    load = () if row.load_max is None else (f"{row.load_min:.2f} … {row.load_max:.2f}",)
    return row.policy, loss, gap, f"{row.weight_bits:.2f}", f"{row.activation_bits:.2f}", seconds, *load


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _loss(line: dict, word: str) -> str:
    if line.get("diverged") is not None:
        return f"diverged at {line['diverged']}"
    value = line.get(f"{word}_loss")
    return "–" if value is None else f"{value:.3f}"
