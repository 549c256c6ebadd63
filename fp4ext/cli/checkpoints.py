"""The commands `export`, `inspect` and `convert-checkpoint`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import Refused
from .arguments import Parser, count, fail

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


def add_export(p: Parser) -> None:
    from ..export import LAYOUTS
    from ..policy import policies

    p.description = EXPORT
    p.epilog = EXPORT_EXAMPLES.format(layouts=", ".join(LAYOUTS), policies=", ".join(policies.names()))
    p.add_argument("source", metavar="SOURCE", help="a run, a checkpoint's folder, or a .safetensors file")
    _add_target(p)
    p.add_argument(
        "--policy", metavar="NAME", help="whose sampler's weights are written (default: the run's own, or end_to_end)"
    )
    p.add_argument("--arm", metavar="NAME", help="which policy's weights of a run (default: the last one trained)")
    p.add_argument("--include", metavar="PATTERN", nargs="+", help="quantize only weights that fit one of these")
    p.add_argument(
        "--exclude",
        metavar="PATTERN",
        nargs="+",
        help="leave weights that fit one of these: names of weights or modules, with wildcards, or re:EXPRESSION",
    )
    p.add_argument("--like", metavar="DIR", help="an earlier export in the same layout, whose scales are kept")


def run_export(args) -> int:
    """The `export` command."""
    source, policy, config = Path(args.source), args.policy, None
    if (source / "checkpoints").is_dir():
        source, policy, config = _of_run(source, args.arm, policy)
    elif args.arm:
        raise Refused(f"--arm {args.arm}: {source} is no run; accepted: without --arm, or the directory of a run")
    from .. import export

    chosen = _chosen(source, args.include, args.exclude)
    return _written(args, export.save, source, policy=policy, filter=chosen, like=args.like, config=config)


def _chosen(source, include: list[str] | None, exclude: list[str] | None):
    """The filter of --include and --exclude. Raises Refused for a pattern that fits no weight of the source."""
    from .. import export

    if include is None and not exclude:
        return None
    names = list(source.state_dict()) if hasattr(source, "state_dict") else list(export.Checkpoint(source))
    fits = {}
    for option, patterns in (("--include", include), ("--exclude", exclude)):
        for pattern in patterns or ():
            fits[pattern] = _pattern(option, pattern)
            if not any(map(fits[pattern], names)):
                near = ", ".join(names[:3])
                raise Refused(f"{option} {pattern}: fits no weight; accepted: patterns of names such as {near}")

    def chosen(name: str, shape) -> bool:
        wanted = include is None or any(fits[pattern](name) for pattern in include)
        return wanted and not any(fits[pattern](name) for pattern in exclude or ())

    return chosen


def _pattern(option: str, pattern: str):
    """A function: whether the name of a weight, or of its module, fits a pattern with wildcards, or after "re:"."""
    import fnmatch
    import re

    try:
        match = re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)).match
    except re.error as error:
        raise Refused(f"{option} {pattern}: {error}; accepted: a regular expression after re:") from None
    return lambda name: bool(match(name) or match(name.removesuffix(".weight")))


def add_inspect(p: Parser) -> None:
    p.description = INSPECT
    p.add_argument("path", metavar="PATH", help="a checkpoint's folder, or a .safetensors file")


def run_inspect(args) -> int:
    """The `inspect` command."""
    from .. import export

    found = export.inspect(args.path)
    print(found)
    return 2 if found.faults else 0


def add_convert_checkpoint(p: Parser) -> None:
    p.description = CONVERT
    p.add_argument("source", metavar="SOURCE", help="a quantized checkpoint")
    _add_target(p)
    p.add_argument("--requantize", action="store_true", help="round weights anew where the layout lacks their format")


def run_convert_checkpoint(args) -> int:
    """The `convert-checkpoint` command."""
    from .. import export

    return _written(args, export.convert_checkpoint, Path(args.source), requantize=args.requantize)


def _add_target(p: Parser) -> None:
    p.add_argument("out", metavar="DIR", help="a new or empty folder")
    p.add_argument("--layout", metavar="NAME", default="compressed-tensors", help="default: compressed-tensors")
    p.add_argument(
        "--overwrite", action="store_true", help="replace the checkpoint that DIR holds, when all is written"
    )
    p.add_argument("--shard", metavar="MB", type=count, default=4096, help="size of a file, about (default: 4096)")


def _written(args, write: Callable, source: Path, **how) -> int:
    """Save or convert, as the arguments say, and print the report."""
    try:
        report = write(source, args.out, args.layout, shard=args.shard << 20, overwrite=args.overwrite, **how)
    except OSError as error:
        fail(f"{args.out} could not be written: {error.strerror or error}; what was there is as it was", code=1)
    except KeyboardInterrupt:
        print(f"\nstopped; nothing of {args.out} was changed", file=sys.stderr)
        return 130
    print(report)
    return 0


def _of_run(run: Path, arm: str | None, policy: str | None):
    """A run's model, the policy to write it by, and its config.json."""
    from ..policy import policies
    from ..train import exported

    taken = exported.of_run(run, arm)
    by = taken.policy or policies.get("end_to_end")
    if policy is not None:
        by = policies.get(policy) if policy in policies.names() or policy.endswith((".toml", ".json")) else None
    return taken.model, policy or by, taken.config(by)
