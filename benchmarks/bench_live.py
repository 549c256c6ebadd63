"""What live statistics cost: a training step of the tiny preset, plain, watched, and watched with the √3 ratio.

    python benchmarks/bench_live.py [--every 50] [--docs]

The three take turns. Every N-th step is watched, every fourth of those looks at the √3 ratio too, so the overhead is
(watched − plain)/N + (ratio − watched)/4N of a plain step.
"""

from __future__ import annotations

import statistics
import time

import torch
from rich.progress import track
from timing import parser, publish, show, write_rows

from fp4ext.audit.live import NOISE_EVERY
from fp4ext.train import PRESETS, data
from fp4ext.train.arm import Arm


def main() -> None:
    p = parser(__doc__.splitlines()[0])
    p.add_argument("--every", type=int, default=50, help="N (default 50)")
    p.add_argument("--policy", default="end_to_end", help="of the arm (default end_to_end)")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    preset = PRESETS["tiny"]
    corpus = data.load((), preset.shape.context)
    arm = Arm(args.policy, preset, 0, torch.device("cpu"), stats=1)
    kinds = {"plain": (10**9, 0), "watched": (1, 0), "watched, with the √3 ratio": (1, 1)}  # every, looks so far
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for i in track(range(3 * args.repeats + 3), description="steps"):
        kind = list(kinds)[i % 3]
        arm.monitor.every, arm.monitor._seen = kinds[kind]
        batch = corpus.batch(0, i, preset.batch, preset.shape.context)
        began = time.perf_counter()
        arm.step(*batch, i + 1)
        if i >= 3:
            taken[kind].append(time.perf_counter() - began)
    plain, watched, ratio = (statistics.median(times) for times in taken.values())
    overhead = ((watched - plain) + (ratio - watched) / NOISE_EVERY) / args.every / plain
    cells = [[kind, f"{1e3 * statistics.median(times):.1f}"] for kind, times in taken.items()]
    cells.append([f"overhead at N = {args.every}", f"{overhead:.2%}"])
    text = show(f"A step of the tiny preset under {args.policy}", ["step", "ms"], cells)
    print("rows:", write_rows("live", [{"every": args.every, "policy": args.policy, "overhead": overhead}]))
    if args.docs:
        print("docs:", publish("live", [text]))


if __name__ == "__main__":
    main()
