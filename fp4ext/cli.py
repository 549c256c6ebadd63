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

EXAMPLES = """\
python -m fp4ext pretrain                    train a small transformer in BF16 and in 4 bits, side by side
python -m fp4ext pretrain --help             its options, with examples
python -m fp4ext rl                          reinforce it on a task: 4-bit sampler, trainer that agrees with it
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
    for add in (add_pretrain, add_rl, add_backends):
        add(commands)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    return args.run(args)


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
    p.add_argument("--policies", metavar="A,B,…", type=_names, help="the arms, comma-separated; gaps are to bf16")
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
            options = {name: given[name] for name in ("policies", "data", "seed", "threads", "device") if name in given}
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


RL = """\
Reinforce a pretrained model on a verifiable task with GRPO, under several arms side by side: the same start, the same
prompts. Ends with a table (reward before and after, how far trainer and sampler disagree, time) and a report.html.
"""

RL_EXAMPLES = """\
examples:
  python -m fp4ext rl
      pretrains a small model on the arithmetic task first, then reinforces it, in runs/<date>
  python -m fp4ext pretrain --preset task --data task:arithmetic --policies end_to_end --out runs/start
  python -m fp4ext rl --from runs/start --arms bf16,mismatched,tis,matched,amax,quantized_backward
      from a run of your own; all comparisons
  python -m fp4ext rl --task examples/reverse_task.py
      a task of your own: a class with text, prompt and reward
  python -m fp4ext rl --resume runs/rl
      go on after Ctrl-C or a crash, bit for bit as if it had never stopped

arms:
  matched             4-bit sampler; the trainer's forward is the same function, its backward BF16
  mismatched          4-bit sampler, BF16 trainer
  tis, rejection, icepop    the same, guarded by token TIS, sequence rejection, IcePop
  bf16                BF16 sampler and trainer
  amax                matched, but one outer scale for a whole tensor: it depends on the batch
  quantized_backward  matched, but the backward in 4 bits too
"""


def add_rl(commands) -> None:
    p = commands.add_parser(
        "rl",
        help="reinforce a pretrained model on a task, sampling in 4 bits",
        description=RL,
        epilog=RL_EXAMPLES,
    )
    p.add_argument("--from", metavar="RUN", dest="source", help="a pretraining run (default: make one first)")
    p.add_argument("--task", metavar="NAME", help="arithmetic, or FILE.py (default: what the run learned)")
    p.add_argument("--arms", metavar="A,B,…", type=_names, help="comma-separated (default: bf16,mismatched,matched)")
    p.add_argument("--policy", metavar="NAME", help="whose 4 bits (default: end_to_end)")
    p.add_argument("--steps", metavar="N", type=_count, help="updates of the policy (default: 100)")
    p.add_argument("--prompts", metavar="N", type=_count, help="prompts a step (default: 32)")
    p.add_argument("--group", metavar="N", type=_count, help="completions of each prompt (default: 8)")
    p.add_argument("--updates", metavar="N", type=_count, help="minibatches a step (default: 2)")
    p.add_argument("--lr", metavar="X", type=float, help="learning rate (default: 5e-4)")
    p.add_argument("--clip", metavar="X", type=float, help="how far a token's ratio counts (default: 0.2)")
    p.add_argument("--kl-coef", metavar="X", type=float, help="weight of the KL to the start (default: 0)")
    p.add_argument("--level", metavar="NAME", help="the loss is a mean over: token or sequence (default: token)")
    p.add_argument("--temperature", metavar="X", type=float, help="of sampling (default: 1)")
    p.add_argument("--kv-cache", metavar="NAME", help="bf16, mxfp8, nvfp4: for both sides (default: bf16)")
    p.add_argument("--seed", metavar="S", type=_seed, help="of prompts and random streams (default: 0)")
    p.add_argument("--slots", metavar="N", type=_count, help="sequences sampled at a time (default: 96)")
    p.add_argument("--save-every", metavar="N", type=_count, help="steps between checkpoints (default: 10)")
    p.add_argument("--threads", metavar="N", type=_count, help="CPU threads (default: torch's choice)")
    where = p.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="DIR", help="a new or empty directory for the run (default: runs/<date>)")
    where.add_argument("--resume", metavar="DIR", help="go on with the run in this directory")
    p.set_defaults(run=run_rl)


def run_rl(args) -> int:
    """The `rl` command."""
    from .train import Refused, Stopped, rl
    from .train.rl import display

    console = _console()
    show = display.Bars(console) if console.is_terminal else display.Lines()
    given = {name: value for name, value in vars(args).items() if value is not None}
    out = Path(args.resume or args.out or time.strftime("runs/%Y%m%d-%H%M%S"))
    again = f"python -m fp4ext rl --resume {shlex.quote(str(out))}"
    options = {name: value for name, value in given.items() if name not in ("command", "run", "resume", "out")}
    try:
        if args.resume:
            if options:
                names = ", ".join("--from" if name == "source" else f"--{name.replace('_', '-')}" for name in options)
                fail(f"{names} beside --resume; accepted: --resume alone, which goes on as the run began")
            result = rl.resume(out, show=show)
        else:
            result = rl.reinforce(rl.Config(**options), out, show=show)
    except Refused as error:
        fail(str(error))
    except Stopped as error:
        fail(f"{error}; once there is room: {again}", code=1)
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
