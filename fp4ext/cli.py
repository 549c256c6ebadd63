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
python -m fp4ext export runs/mine out        a run, or any BF16 checkpoint, as a 4-bit checkpoint that others read
python -m fp4ext inspect out                 its layout, formats, bits, scales and faults
python -m fp4ext convert-checkpoint out new --layout modelopt
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


EXPORT = """\
Quantize the linear layers and experts of a checkpoint, straight from its files, and write it in a layout that others
read. SOURCE is a run of `pretrain`, a folder with safetensors (of any architecture), or one such file.
"""

EXPORT_EXAMPLES = """\
examples:
  python -m fp4ext export runs/mine out/mine
      the newest weights of a run, by the policy they were trained under, in the layout compressed-tensors
  python -m fp4ext export ~/models/llama out/llama --layout modelopt --policy four_over_six
      any BF16 checkpoint; q, k, v and gate, up share an outer scale, as readers that fuse them want
  python -m fp4ext export ~/models/moe out/moe --layout inkling2 --exclude "*.layers.0.*" --policy nvfp4/sweep
      experts alone, stacked, layer 0 left as it is
  python -m fp4ext export runs/mine out/next --like out/mine
      keep the scales of an earlier export: weights that did not change keep their bytes

layouts: {layouts}
policies: {policies}; or a spec for all weights alike, such as mxfp8 or nvfp4/sweep/nearest/1x16/pow2
"""

INSPECT = """\
Say what a checkpoint holds: layout, format and bits of each kind of weight, ranges of its scales, and what is wrong
with it. Nothing in it is believed, run or unpickled. Ends with 2 where it finds a fault.
"""

CONVERT = """\
Write a quantized checkpoint in another layout. Codes and block scales move as they are; where the new layout cannot
keep the outer scale exactly, it says so, weight by weight. A format that it cannot hold is refused, or rounded anew
with --requantize.
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
    for add in (add_pretrain, add_export, add_inspect, add_convert, add_backends):
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


def add_export(commands) -> None:
    from . import policies
    from .export import LAYOUTS

    text = EXPORT_EXAMPLES.format(layouts=", ".join(LAYOUTS), policies=", ".join(policies.names()))
    p = commands.add_parser("export", help="a 4-bit checkpoint that others read", description=EXPORT, epilog=text)
    p.add_argument("source", metavar="SOURCE", help="a run, a checkpoint's folder, or a .safetensors file")
    _add_target(p)
    p.add_argument(
        "--policy", metavar="NAME", help="whose sampler's weights are written (default: the run's own, or end_to_end)"
    )
    p.add_argument("--arm", metavar="NAME", help="which policy's weights of a run (default: the last one trained)")
    p.add_argument("--include", metavar="PATTERN", nargs="+", help="quantize only weights whose names fit one of these")
    p.add_argument("--exclude", metavar="PATTERN", nargs="+", help="leave weights whose names fit one of these")
    p.add_argument("--like", metavar="DIR", help="an earlier export in the same layout, whose scales are kept")
    p.set_defaults(run=run_export)


def run_export(args) -> int:
    """The `export` command."""
    from fnmatch import fnmatchcase

    def chosen(name: str, shape) -> bool:
        wanted = args.include is None or any(fnmatchcase(name, pattern) for pattern in args.include)
        return wanted and not any(fnmatchcase(name, pattern) for pattern in args.exclude or ())

    source, policy = Path(args.source), args.policy
    if (source / "checkpoints").is_dir():
        source, trained = _weights_of_run(source, args.arm)
        policy = policy or (trained if trained != "bf16" else None)
    elif args.arm:
        fail(f"--arm {args.arm}: {source} is no run; accepted: without --arm, or the directory of a run")
    return _written(args, "save", source, policy=policy, filter=chosen, like=args.like)


def add_inspect(commands) -> None:
    p = commands.add_parser("inspect", help="what a checkpoint holds, and what is wrong with it", description=INSPECT)
    p.add_argument("path", metavar="PATH", help="a checkpoint's folder, or a .safetensors file")
    p.set_defaults(run=run_inspect)


def run_inspect(args) -> int:
    """The `inspect` command."""
    from . import export

    try:
        found = export.inspect(args.path)
    except export.Refused as error:
        fail(str(error))
    print(found)
    return 2 if found.faults else 0


def add_convert(commands) -> None:
    p = commands.add_parser("convert-checkpoint", help="a checkpoint in another layout", description=CONVERT)
    p.add_argument("source", metavar="SOURCE", help="a quantized checkpoint")
    _add_target(p)
    p.add_argument("--requantize", action="store_true", help="round weights anew where the layout lacks their format")
    p.set_defaults(run=run_convert)


def run_convert(args) -> int:
    """The `convert-checkpoint` command."""
    return _written(args, "convert", Path(args.source), requantize=args.requantize)


def _add_target(p: Parser) -> None:
    p.add_argument("out", metavar="DIR", help="a new or empty folder")
    p.add_argument("--layout", metavar="NAME", default="compressed-tensors", help="default: compressed-tensors")
    p.add_argument(
        "--overwrite", action="store_true", help="replace the checkpoint that DIR holds, when all is written"
    )
    p.add_argument("--shard", metavar="MB", type=_count, default=4096, help="size of a file, about (default: 4096)")


def _written(args, verb: str, source: Path, **how) -> int:
    """Save or convert, as the arguments say, and print the report."""
    from . import export

    try:
        report = getattr(export, verb)(
            source, args.out, args.layout, shard=args.shard << 20, overwrite=args.overwrite, **how
        )
    except (export.Refused, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{args.out} could not be written: {error.strerror or error}; what was there is as it was", code=1)
    except KeyboardInterrupt:
        print(f"\nstopped; nothing of {args.out} was changed", file=sys.stderr)
        return 130
    print(report)
    return 0


def _weights_of_run(run: Path, arm: str | None) -> tuple[Path, str]:
    """The newest weights of a run's arm, and its policy."""
    from .train import checkpoint

    step = checkpoint.latest(run / "checkpoints")
    files = sorted(step.glob("*.weights.safetensors")) if step else []
    arms = {path.name.removesuffix(".weights.safetensors"): path for path in files}
    if not arms:
        fail(f"{run}: no checkpoint in it yet; accepted: a run that has saved one")
    if arm is None:
        from .train.run import read_config

        order = read_config(run)["run"]["policies"]
        arm = next((name for name in reversed(order) if name in arms), next(iter(arms)))
    if arm not in arms:
        fail(f"--arm {arm}: not in {run}; accepted: {', '.join(arms)}")
    return arms[arm], arm


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
