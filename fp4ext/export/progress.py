"""A bar on stderr while a checkpoint is read or written; silence where nobody looks."""

from __future__ import annotations

import sys

from .errors import shown


class Bar:
    """`with Bar(total bytes) as bar: bar.advance(bytes, what)`. `shown`: None means on a terminal."""

    def __init__(self, total: int, shown: bool | None = None):
        self.total, self.shown = total, sys.stderr.isatty() if shown is None else shown

    def __enter__(self) -> Bar:
        if self.shown:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                BarColumn(bar_width=32),
                DownloadColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self.progress = Progress(*columns, console=Console(stderr=True, force_terminal=True), transient=True)
            self.task = self.progress.add_task("", total=self.total)
            self.progress.start()
        return self

    def advance(self, amount: int, what: str) -> None:
        """So many bytes more, the last of them of this weight."""
        if self.shown:
            self.progress.update(self.task, advance=amount, description=shown(what, 60))

    def __exit__(self, *error: object) -> None:
        if self.shown:
            self.progress.stop()
