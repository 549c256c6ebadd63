"""What live statistics cost: a training step of a preset, plain, watched, and watched with the √3 ratio.

    python benchmarks/bench_live.py [--every 50] [--docs]

The three take turns. Every N-th step is watched, every eighth of those looks at the √3 ratio too, so the overhead is
(watched − plain)/N + (ratio − watched)/8N of a plain step. About a minute on two quiet cores.
"""

from __future__ import annotations

import statistics
import time

import torch
from rich.progress import track
from timing import parser, publish, show, write_rows

from fp4ext.audit.live import NOISE_EVERY
from fp4ext.train import PRESETS, data
from fp4ext.train.pretraining.arm import Arm

KINDS = {"plain": (10**9, 0), "watched": (1, 0), "watched, with the √3 ratio": (1, 1)}  # every, looks so far


def steps(name: str, policy: str, repeats: int) -> dict[str, float]:
    """Median seconds of a step of each kind."""
    preset = PRESETS[name]
    corpus = data.load((), preset.shape.context)
    arm = Arm(policy, preset, 0, torch.device("cpu"), stats=1)
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for i in track(range(len(KINDS) * (repeats + 1)), description=name):
        kind = list(KINDS)[i % len(KINDS)]
        arm.monitor.every, arm.monitor._seen = KINDS[kind]
        batch = corpus.batch(0, i, preset.batch, preset.shape.context)
        began = time.perf_counter()
        arm.step(*batch, i + 1)
        if i >= len(KINDS):
            taken[kind].append(time.perf_counter() - began)
    return {kind: statistics.median(times) for kind, times in taken.items()}


def main() -> None:
    p = parser(__doc__.splitlines()[0])
    p.add_argument("--every", type=int, default=50, help="N (default 50)")
    p.add_argument("--policy", default="end_to_end", help="of the arm (default end_to_end)")
    p.add_argument("--presets", default="tiny,moe-tiny", help="comma-separated (default tiny,moe-tiny)")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    rows, cells = [], []
    for name in args.presets.split(","):
        typical = steps(name, args.policy, args.repeats)
        plain, watched, ratio = typical.values()
        overhead = ((watched - plain) + (ratio - watched) / NOISE_EVERY) / args.every / plain
        rows.append({"preset": name, "every": args.every, "policy": args.policy, "overhead": overhead})
        cells.append([name, *(f"{1e3 * t:.0f}" for t in typical.values()), f"{overhead:.2%}"])
    columns = ["preset", *(f"{kind}, ms" for kind in KINDS), f"overhead at N = {args.every}"]
    text = show(f"A training step under {args.policy}", columns, cells)
    print("rows:", write_rows("live", rows))
    if args.docs:
        print("docs:", publish("live", [text]))


if __name__ == "__main__":
    main()
