"""What a person sees while a job runs: bars on a terminal, lines elsewhere, nothing from Python; and its last table."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from .view import View

say = partial(print, flush=True)  # so that lines reach a file or a pipe while the run goes on


class Silent:
    """The interface, doing nothing. `step` gets the metrics lines of all arms after each step."""

    def start(self, arms, start: int, steps: int, out: Path) -> None: ...

    def step(self, done: int, lines: list[dict]) -> None: ...

    def note(self, text: str) -> None: ...

    def of(self, view: View) -> Silent:
        """A display of the same kind for another job, one that comes before this one."""
        return Silent()

    def close(self) -> None: ...


class Lines(Silent):
    """Plain lines, one for each evaluation and at most every ten seconds: for logs and pipes."""

    def __init__(self, view: View, write=say, every: float = 10.0):
        self.view, self.write, self.every = view, write, every

    def of(self, view: View) -> Lines:
        return Lines(view, self.write, self.every)

    def start(self, arms, start: int, steps: int, out: Path) -> None:
        self.first, self.steps, self.began, self.last = start, steps, time.monotonic(), 0.0
        self.write(f"{headline(arms, start, steps)} → {out}")

    def step(self, done: int, lines: list[dict]) -> None:
        now = time.monotonic()
        if self.view.evaluated not in lines[0] and now - self.last < self.every:
            return
        self.last, left = now, ""
        if self.first < done < self.steps:
            left = f"  {clock((now - self.began) / (done - self.first) * (self.steps - done))} left"
        self.write(f"step {done}/{self.steps}  {self.view.line(lines)}{left}")

    def note(self, text: str) -> None:
        self.write(text)


class Bars(Silent):
    """A progress bar and, below it, a table with a row for each arm.

    above: what is drawn over them, of a job that this is a stage of; all of it then goes when the stage is over.
    """

    def __init__(self, view: View, console, above=None):
        self.view, self.console, self.above = view, console, above

    def of(self, view: View) -> Bars:
        return Bars(view, self.console)

    def start(self, arms, start: int, steps: int, out: Path) -> None:
        from rich import progress
        from rich.live import Live

        self.console.print(f"{headline(arms, start, steps)} → {out}", highlight=False)
        self.progress = progress.Progress(
            progress.BarColumn(bar_width=32),
            progress.MofNCompleteColumn(),
            progress.TextColumn("steps"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("·"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
            console=self.console,
        )
        self.task = self.progress.add_task("", total=steps, completed=start)
        self.arms: dict[str, dict] = {arm.policy: {} for arm in arms}
        transient = self.above is not None
        self.live = Live(self._drawn(), console=self.console, refresh_per_second=4, transient=transient)
        self.live.start()

    def step(self, done: int, lines: list[dict]) -> None:
        view = self.view
        for line in lines:
            arm = self.arms[line[view.key]]
            for key in view.smoothed:
                if line.get(key) is not None:
                    arm[key] = view.memory * arm.get(key, line[key]) + (1 - view.memory) * line[key]
            arm.update({key: line[key] for key in view.newest if key in line})
            arm.update({key: max(line[key], arm.get(key, line[key])) for key in view.largest if key in line})
        self.progress.update(self.task, completed=done)
        self.live.update(self._drawn())

    def note(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False)

    def close(self) -> None:
        if hasattr(self, "live"):
            self.live.stop()

    def _drawn(self):
        from rich.console import Group
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in (self.view.key, *(heading for heading, _ in self.view.live)):
            table.add_column(heading, justify="left" if heading == self.view.key else "right", header_style="dim")
        for name, arm in self.arms.items():
            table.add_row(name, *(cell(name, arm, self.arms) for _, cell in self.view.live))
        return Group(*([self.above] if self.above is not None else []), self.progress, table)


def headline(arms, start: int, steps: int) -> str:
    parameters = sum(p.numel() for p in arms[0].model.parameters())
    begin = f"from step {start} to {steps}" if start else f"{steps} steps"
    return f"{len(arms)} × {parameters / 1e6:.2f} M parameters, {begin}"


def final_table(view: View, result, console) -> None:
    """Print the outcome and where the report is."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0 if len(view.columns) > 8 else (0, 1))
    columns = [column for column in view.columns if column.short]
    for column in columns:
        table.add_column(column.short, justify="left" if column.name == view.key else "right")
    for row in result.rows:
        table.add_row(*(column.cell(row) for column in columns))
    console.print(table)
    for remark in view.remarks(result):
        console.print(remark, highlight=False)
    console.print(f"report: {result.report}", highlight=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """75 → 1:15."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
