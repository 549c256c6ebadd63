"""The command line: it parses and prints; what it does is in fp4ext.train, export and audit, usable from Python.

COMMANDS names the file of each command, which is imported when the command is given: `--help` imports no torch. Exit
codes: 0 done · 2 an input was refused, nothing was computed or overwritten · 1 the machine failed (a full disk, say) ·
130 Ctrl-C, 143 SIGTERM: the run was saved, and a line says how to resume it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import Refused
from .arguments import Command, Parser, fail

COMMANDS = {  # name: (file with its options `add_…` and its work `run_…`, one line of help)
    "pretrain": ("pretrain", "train one small transformer under several policies, side by side"),
    "rl": ("rl", "reinforce a pretrained model on a task, sampling in 4 bits"),
    "end-to-end": ("end_to_end", "pretrain, reinforce, export and read back, all in 4 bits"),
    "export": ("checkpoints", "a 4-bit checkpoint that others read"),
    "inspect": ("checkpoints", "what a checkpoint holds, and what is wrong with it"),
    "convert-checkpoint": ("checkpoints", "a checkpoint in another layout"),
    "audit": ("audit", "tell noise from drift in a model, and propose a policy"),
    "cost": ("audit", "what training or sampling a model takes on a machine, and which term binds"),
    "explain": ("audit", "what rounding does to a number, once and a thousand times"),
    "backends": ("backends", "what this machine can run, and why not the rest"),
}

EXAMPLES = """\
python -m fp4ext pretrain                    train a small transformer in BF16 and in 4 bits, side by side
python -m fp4ext pretrain --help             its options, with examples
python -m fp4ext rl                          reinforce it on a task: 4-bit sampler, trainer that agrees with it
python -m fp4ext end-to-end                  both, then a 4-bit checkpoint, read back: the four stages in one command
python -m fp4ext audit runs/demo/pretrain    tell noise from drift in its model, and propose a policy
python -m fp4ext cost --help                 what a run takes on a machine, and which term binds
python -m fp4ext explain 3.2 --grid 3,4      what rounding does once, and a thousand times
python -m fp4ext export runs/mine out        a run, or any BF16 checkpoint, as a 4-bit checkpoint that others read
python -m fp4ext inspect out                 its layout, formats, bits, scales and faults
python -m fp4ext convert-checkpoint out new --layout modelopt
python -m fp4ext backends                    what this machine can run, and why not the rest
"""


def version() -> str:
    """The package's version."""
    from .. import __version__

    return __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code."""
    parser = Parser(
        prog="python -m fp4ext",
        description="Train, sample and reinforce PyTorch models in 4 bits.",
        epilog="examples:\n" + EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"fp4ext {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=Command)
    for name, (file, text) in COMMANDS.items():
        commands.add_parser(name, help=text, file=file, verb=name.replace("-", "_"))
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except Refused as error:
        fail(str(error))
