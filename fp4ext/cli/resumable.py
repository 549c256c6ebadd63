"""How a command begins and ends whose work can be stopped and taken up again."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Refused, Stopped
from .arguments import fail, terminal


def add_where(parser) -> None:
    """The options --out and --resume."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="DIR", help="a new or empty directory for the run (default: runs/<date>)")
    where.add_argument("--resume", metavar="DIR", help="go on with the run in this directory")


@dataclass(frozen=True)
class Job:
    """What the command line asked for.

    Attributes:
        console, show: where results go, and a display of progress: bars on a terminal, lines elsewhere.
        out: the run directory.
        again: the command that goes on with it.
        given: the other options that were given.
    """

    console: Any
    show: Any
    out: Path
    again: str
    given: dict

    @classmethod
    def of(cls, args, bars, lines) -> Job:
        """bars: (console) → the display for a terminal; lines: () → that for everything else."""
        console = terminal()
        out = Path(args.resume or args.out or time.strftime("runs/%Y%m%d-%H%M%S"))
        own = ("command", "run", "resume", "out")
        return cls(
            console,
            bars(console) if console.is_terminal else lines(),
            out,
            " ".join([f"python -m fp4ext {args.command} --resume {shlex.quote(str(out))}", *_code(args)]),
            {name: value for name, value in vars(args).items() if value is not None and name not in own},
        )

    def nothing_beside_resume(self, but: str) -> None:
        """Refuses other options: the run goes on as it began. `but` one, by which a user vouches for a file."""
        given = [name for name in self.given if name != but]
        if given:
            names = ", ".join("--from" if name == "source" else f"--{name.replace('_', '-')}" for name in given)
            alone = f"--resume alone, which goes on as the run began (and --{but}, where that is a file)"
            raise Refused(f"{names} beside --resume; accepted: {alone}")


def _code(args) -> list[str]:
    """The options by which the user named a file with code in it: --resume needs them too."""
    named, data = getattr(args, "task", None), getattr(args, "data", None) or []
    words = ["--task", named] if named and ".py" in named else []
    words += ["--data", *data] if any(path.startswith("task:") and ".py" in path for path in data) else []
    return list(map(shlex.quote, words))


def carried_out(work, job: Job, table) -> int:
    """Do the work of a job that can be resumed, print its table. Returns the exit code.

    table: prints the result; may return another exit code than 0.
    """
    from ..train.runs.directory import CONFIG

    def again() -> str:
        """A command that is not refused: with config.json there is a run to go on with."""
        return job.again if (job.out / CONFIG).exists() else "the same command"

    try:
        result = work()
    except Stopped as error:
        fail(f"{error}; once there is room: {again()}", code=1)
    except KeyboardInterrupt:
        print(f"\nstopped at once; to go on from the last checkpoint, if there is one: {again()}", file=sys.stderr)
        return 130
    if not result.finished:
        print(f"saved after {result.at}; to go on: {job.again}")
        return 128 + result.signal
    return table(result) or 0
