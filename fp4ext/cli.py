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
python -m fp4ext rl                          reinforce it on a task: 4-bit sampler, trainer that agrees with it
python -m fp4ext audit runs/demo              tell noise from drift in its model, and propose a policy
python -m fp4ext cost --help                 what a run takes on a machine, and which term binds
python -m fp4ext explain 3.2 --grid 3,4       what rounding does once, and a thousand times
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
  python -m fp4ext pretrain --preset moe-tiny --policies bf16,nvidia,end_to_end
      a mixture of experts
  python -m fp4ext pretrain --model inkling2-tiny --policies bf16,end_to_end
      a model of transformers, converted: pip install 'fp4ext[transformers]'
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
    for add in (
        add_pretrain,
        add_rl,
        add_export,
        add_inspect,
        add_convert,
        add_audit,
        add_cost,
        add_explain,
        add_backends,
    ):
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
    ours = [name for name, preset in presets.PRESETS.items() if preset.model == "transformer"]
    theirs = [name for name in presets.PRESETS if name not in ours]
    model = p.add_mutually_exclusive_group()
    model.add_argument("--preset", metavar="NAME", help=f"model and schedule: {', '.join(ours)} (default: tiny)")
    model.add_argument(
        "--model",
        metavar="NAME",
        dest="preset",
        help=f"instead, transformers' own model, small: {', '.join(theirs)} (about 3M parameters)",
    )
    p.add_argument("--steps", metavar="N", type=_count, help="training steps (default: the preset's)")
    p.add_argument("--batch", metavar="N", type=_count, help="sequences a step (default: the preset's)")
    p.add_argument("--lr", metavar="X", type=_rate, help="learning rate after the warm-up (default: the preset's)")
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

    def work():
        if args.resume:
            asked = {name: value for name, value in given.items() if name not in ("command", "run", "resume")}
            return train.resume(out, show=show, asked=asked)
        changes = {name: given[name] for name in ADJUSTABLE if name in given}
        preset = presets.get(args.preset or "tiny").with_(**changes)
        names = ("policies", "data", "seed", "threads", "device", "stats")
        options = {name: given[name] for name in names if name in given}
        return train.pretrain(train.Config(preset, **options), out, show=show)

    def begun() -> bool:
        return checkpoint.latest(out / "checkpoints") is not None

    return _carried_out(work, again, lambda result: display.final_table(result, console), begun)


def _carried_out(work, again: str, table, begun=lambda: True) -> int:
    """Do the work of a run that can be resumed by `again`, print its table. Returns the exit code.

    begun: whether a checkpoint is there to go on from, asked when the disk has given out.
    """
    from .train import Refused, Stopped

    try:
        result = work()
    except Refused as error:
        fail(str(error))
    except Stopped as error:
        fail(f"{error}; once there is room: {again if begun() else 'the same command'}", code=1)
    except KeyboardInterrupt:
        print(f"\nstopped at once; the last checkpoint goes on with: {again}", file=sys.stderr)
        return 130
    if not result.finished:
        print(f"saved after step {result.step}; to go on: {again}")
        return 128 + result.signal
    table(result)
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
    from .train import rl
    from .train.rl import display

    console = _console()
    show = display.Bars(console) if console.is_terminal else display.Lines()
    given = {name: value for name, value in vars(args).items() if value is not None}
    out = Path(args.resume or args.out or time.strftime("runs/%Y%m%d-%H%M%S"))
    again = f"python -m fp4ext rl --resume {shlex.quote(str(out))}"
    options = {name: value for name, value in given.items() if name not in ("command", "run", "resume", "out")}

    def work():
        if not args.resume:
            return rl.reinforce(rl.Config(**options), out, show=show)
        if options:
            names = ", ".join("--from" if name == "source" else f"--{name.replace('_', '-')}" for name in options)
            fail(f"{names} beside --resume; accepted: --resume alone, which goes on as the run began")
        return rl.resume(out, show=show)

    return _carried_out(work, again, lambda result: display.final_table(result, console))


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


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a number between 0 and 1")
    return value


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
