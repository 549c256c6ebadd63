"""The command line: it parses and prints; what it does is in fp4ext.train, export and audit, usable from Python.

A file a group of commands. Exit codes: 0 done · 2 an input was refused, nothing was computed or overwritten · 1 the
machine gave out (a full disk) · 130 Ctrl-C, 143 SIGTERM: saved, and said how to go on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .arguments import Parser, fail
from .audit import add_audit, add_cost, add_explain
from .backends import add_backends
from .checkpoints import add_convert, add_export, add_inspect
from .end_to_end import add_end_to_end
from .pretrain import add_pretrain
from .rl import add_rl


def version() -> str:
    """That of the package."""
    from .. import __version__

    return __version__


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
python -m fp4ext backends                    what this machine has, and why not the others
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code."""
    parser = Parser(
        prog="python -m fp4ext",
        description="Train, sample and reinforce PyTorch models in 4 bits.",
        epilog="examples:\n" + EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"fp4ext {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for add in (
        add_pretrain,
        add_rl,
        add_end_to_end,
        add_export,
        add_inspect,
        add_convert,
        add_audit,
        add_cost,
        add_explain,
        add_backends,
    ):
        try:
            add(commands)
        except ImportError as error:
            fail(f"{error}; the command line needs all: pip install 'fp4ext[all]'")
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except ValueError as error:
        if not any(word in str(error) for word in ("accepted", "policies:", "formats:")):
            raise  # a fault of ours, not an input that was refused
        fail(str(error))
