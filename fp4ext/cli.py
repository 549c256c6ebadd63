"""The command line: it parses and prints; what it does is in fp4ext.train, usable from Python.

Exit codes: 0 done · 2 an input was refused, nothing was computed or overwritten · 1 the machine gave out (a full
disk) · 130 Ctrl-C, 143 SIGTERM: saved, and said how to go on.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .cli_audit import add_audit, add_cost, add_explain

EXAMPLES = """\
python -m fp4ext pretrain                    train a small transformer in BF16 and in 4 bits, side by side
python -m fp4ext pretrain --help             its options, with examples
python -m fp4ext audit runs/demo              tell noise from drift in its model, and propose a policy
python -m fp4ext cost --help                 what a run takes on a machine, and which term binds
python -m fp4ext explain 3.2 --grid 3,4       what rounding does once, and a thousand times
python -m fp4ext backends                    what this machine has, and why not the others
"""

PRETRAIN = """\
Train one small transformer over bytes under several policies, side by side: the same initial weights, the same batches.
Ends with a table (validation loss, gap to bf16, bits stored, time) and a report.html in the run directory.
"""

PRETRAIN_EXAMPLES = """\
examples:
  python -m fp4ext pretrain
      the tiny preset on the source of Python's standard library, in runs/<date>
  python -m fp4ext pretrain --policies bf16,nvidia --steps 1000 --out runs/long
      two policies, more steps
  python -m fp4ext pretrain --data ~/notes book.txt --preset small
      your own text: folders are searched for text files, files are taken as they are
  python -m fp4ext pretrain --resume runs/long
      go on after Ctrl-C, a crash or a full disk, bit for bit as if it had never stopped

policies: {policies}
"""


class Parser(argparse.ArgumentParser):
    """argparse, with errors of one line."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        fail(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code."""
    parser = Parser(
        prog="python -m fp4ext",
        description="Train, sample and reinforce PyTorch models in 4 bits.",
        epilog="examples:\n" + EXAMPLES,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for add in (add_pretrain, add_audit, add_cost, add_explain, add_backends):
        add(commands)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return args.run(args)
    except ValueError as error:
        if not any(word in str(error) for word in ("accepted", "policies:", "formats:")):
            raise  # a fault of ours, not an input that was refused
        fail(str(error))


def add_pretrain(commands) -> None:
    from .train import arm, presets

    policies = ", ".join(arm.policy_names())
    p = commands.add_parser(
        "pretrain",
        help="train one small transformer under several policies, side by side",
        description=PRETRAIN,
        epilog=PRETRAIN_EXAMPLES.format(policies=policies),
    )
    # No default here: what was not given is None, so that --resume can tell it from what was.
    p.add_argument("--policies", metavar="A,B,…", type=_names, help="the arms, comma-separated; names or files")
    p.add_argument(
        "--data",
        metavar="PATH",
        nargs="+",
        help="files or folders of text (default: the Python standard library's source)",
    )
    p.add_argument(
        "--preset", metavar="NAME", help=f"model and schedule: {' or '.join(presets.PRESETS)} (default: tiny)"
    )
    p.add_argument("--steps", metavar="N", type=_count, help="training steps (default: the preset's)")
    p.add_argument("--batch", metavar="N", type=_count, help="sequences a step (default: the preset's)")
    p.add_argument("--seed", metavar="S", type=_seed, help="of weights, batches and rounding (default: 0)")
    p.add_argument("--eval-every", metavar="N", type=_count, help="steps between evaluations (default: the preset's)")
    p.add_argument("--save-every", metavar="N", type=_count, help="steps between checkpoints (default: the preset's)")
    p.add_argument("--stats", metavar="N", type=_count, help="watch the quantizers every N steps (default: don't)")
    p.add_argument("--threads", metavar="N", type=_count, help="CPU threads (default: torch's choice)")
    p.add_argument("--device", metavar="NAME", help="cpu or cuda (default: cpu)")
    where = p.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="DIR", help="a new or empty directory for the run (default: runs/<date>)")
    where.add_argument("--resume", metavar="DIR", help="go on with the run in this directory")
    p.set_defaults(run=run_pretrain)


def run_pretrain(args) -> int:
    """The `pretrain` command."""
    from . import train
    from .train import checkpoint, display, presets
    from .train.config import ADJUSTABLE

    console = _console()
    show = display.Bars(console) if console.is_terminal else display.Lines()
    given = {name: value for name, value in vars(args).items() if value is not None}
    out = Path(args.resume or args.out or time.strftime("runs/%Y%m%d-%H%M%S"))
    again = f"python -m fp4ext pretrain --resume {shlex.quote(str(out))}"
    try:
        if args.resume:
            asked = {name: value for name, value in given.items() if name not in ("command", "run", "resume")}
            result = train.resume(out, show=show, asked=asked)
        else:
            preset = presets.get(args.preset or "tiny").with_(
                **{name: given[name] for name in ADJUSTABLE if name in given}
            )
            options = {
                name: given[name]
                for name in ("policies", "data", "seed", "threads", "device", "stats")
                if name in given
            }
            result = train.pretrain(train.Config(preset, **options), out, show=show)
    except train.Refused as error:
        fail(str(error))
    except train.Stopped as error:
        begun = checkpoint.latest(out / "checkpoints") is not None
        fail(f"{error}; once there is room: {again if begun else 'the same command'}", code=1)
    except KeyboardInterrupt:
        print(f"\nstopped at once; the last checkpoint goes on with: {again}", file=sys.stderr)
        return 130
    if not result.finished:
        print(f"saved after step {result.step}; to go on: {again}")
        return 128 + result.signal
    display.final_table(result, console)
    return 0


def add_backends(commands) -> None:
    p = commands.add_parser("backends", help="what this machine has, and why not the others")
    p.set_defaults(run=run_backends)


def run_backends(args) -> int:
    """The `backends` command."""
    import fp4ext

    for name, state in fp4ext.backends().items():
        print(f"{name:10} {state}")
    return 0


def fail(message: str, code: int = 2):
    """One line on stderr, and out."""
    print(f"fp4ext: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def _console():
    from rich.console import Console

    return Console()


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _count(text: str) -> int:
    return _whole(text, least=1)


def _seed(text: str) -> int:
    return _whole(text, least=0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a whole number from {least}")
    return value
