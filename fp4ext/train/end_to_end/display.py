"""One display for the four stages: a list of them with what each found, and below it the bars of the one that runs."""

from __future__ import annotations

import time
from pathlib import Path

from ..pretraining.view import VIEW as PRETRAINING
from ..rl.view import VIEW as RL
from ..runs import display
from ..runs.display import clock, say
from .result import Result
from .words import CHECKED, TITLES, rows

VIEWS = {"pretrain": PRETRAINING, "rl": RL}


class Stages:
    """The interface, doing nothing."""

    def start(self, stages, out: Path) -> None: ...

    def begin(self, stage: str) -> None: ...

    def done(self, stage: str, said: str, seconds: float) -> None: ...

    def display(self, stage: str):
        """That of a stage's own job."""
        return display.Silent()

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Lines(Stages):
    """Plain lines: for logs and pipes."""

    def __init__(self, write=say, every: float = 10.0):
        self.write, self.every = write, every

    def start(self, stages, out: Path) -> None:
        self.stages = list(stages)
        self.write(f"{len(self.stages)} stages → {out}")

    def begin(self, stage: str) -> None:
        self.write(f"stage {self.stages.index(stage) + 1} of {len(self.stages)}: {TITLES[stage]}")

    def done(self, stage: str, said: str, seconds: float) -> None:
        self.write(f"stage {self.stages.index(stage) + 1} done, {clock(seconds)}: {said}")

    def display(self, stage: str):
        return display.Lines(VIEWS[stage], self.write, self.every) if stage in VIEWS else display.Silent()

    def note(self, text: str) -> None:
        self.write(text)


class Bars(Stages):
    """The list stays on the screen, above the bars of the stage that runs."""

    def __init__(self, console):
        self.console, self.said = console, {}

    def start(self, stages, out: Path) -> None:
        self.stages, self.began = list(stages), time.monotonic()
        self.console.print(f"{len(self.stages)} stages → {out}", highlight=False)

    def begin(self, stage: str) -> None:
        self.running, self.began = stage, time.monotonic()
        if stage in ("export", "reload"):
            from rich.live import Live

            self.live = Live(self, console=self.console, refresh_per_second=4, transient=True)
            self.live.start()

    def done(self, stage: str, said: str, seconds: float) -> None:
        self.close()
        self.said[stage] = said, seconds

    def display(self, stage: str):
        return display.Bars(VIEWS[stage], self.console, above=self) if stage in VIEWS else display.Silent()

    def note(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False)

    def close(self) -> None:
        if hasattr(self, "live"):
            self.live.stop()
            del self.live

    def __rich__(self):
        """The list, drawn anew at every refresh."""
        from rich.table import Table

        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        table.add_column(justify="right", no_wrap=True)
        for number, stage in enumerate(self.stages, 1):
            said, seconds = self.said.get(stage, ("", None))
            mark = "✓" if stage in self.said else "▶" if stage == self.running else "·"
            seconds = time.monotonic() - self.began if stage == self.running else seconds
            style = None if stage in self.said or stage == self.running else "dim"
            name = f"{mark} {number} {stage}"
            table.add_row(name, said or TITLES[stage], "" if seconds is None else clock(seconds), style=style)
        return table


def final_table(result: Result, console) -> int:
    """Print what the stages found and where the report is. Returns the exit code: 1 if the checkpoint says otherwise
    than the weights that it was written from."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("found", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    for stage, what, found, seconds in rows(result):
        table.add_row(stage, what, found, clock(seconds))
    console.print(table)
    console.print(f"checkpoint: {result.checkpoint}", highlight=False, soft_wrap=True)
    console.print(f"report: {result.report}", highlight=False, soft_wrap=True)
    if not result.reloaded.same:
        console.print(f"the checkpoint is not what was written: {CHECKED}", style="bold red")
        return 1
    return 0
