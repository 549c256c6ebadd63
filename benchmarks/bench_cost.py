"""The cost model against the clock: layer steps that it predicts from operations timed at other sizes, beside what they
take, all in the same rounds.

    python benchmarks/bench_cost.py [--threads 1] [--docs]
"""

from __future__ import annotations

import time

import torch
from timing import parser, publish, show, write_rows

import fp4ext
from fp4ext import policies
from fp4ext.audit.calibrate import calibrate
from fp4ext.audit.cost_model import layer_seconds
from fp4ext.audit.operations import of_layer

POLICIES = ("mxfp8", "nvidia", "end_to_end")
SHAPES = ((384, 512, 384), (512, 704, 128), (1024, 1024, 512))  # T, N, K


def training_step(policy: str, t: int, n: int, k: int):
    """A function that runs a layer forward and backward on BF16 activations."""
    layer = fp4ext.Linear(k, n, bias=False, policy=policy, dtype=torch.bfloat16)
    x, dy = torch.randn(t, k).bfloat16().requires_grad_(), torch.randn(t, n).bfloat16()

    def step():
        with torch.enable_grad():
            torch.autograd.grad(layer(x), (x, layer.weight), dy)

    return step


def main() -> None:
    args = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clock = time.thread_time if args.threads == 1 else time.perf_counter  # one thread's own time, if it has but one
    rows, cells = [], []
    for t, n, k in SHAPES:
        work = {name: of_layer(policies.get(name).pretrain, t, n, k) for name in POLICIES}
        steps = {name: training_step(name, t, n, k) for name in POLICIES}
        wanted = [op for ops in work.values() for op in ops]
        here, measured = calibrate(wanted, 2 * args.repeats + 1, also=steps, clock=clock)
        for name in POLICIES:
            predicted = layer_seconds(work[name], here)
            row = {"policy": name, "t": t, "n": n, "k": k, "predicted": predicted, "measured": measured[name]}
            rows.append(row | {"ratio": predicted / measured[name]})
            times = (f"{1e3 * predicted:.2f}", f"{1e3 * measured[name]:.2f}", f"{predicted / measured[name] - 1:+.0%}")
            cells.append([f"{name}, {t}×{n}×{k}", *times])
    columns = ["policy, T×N×K", "predicted, ms", "measured, ms", "off by"]
    text = show("A layer, forward and backward: predicted from operations at other sizes", columns, cells)
    print("rows:", write_rows("cost", rows))
    if args.docs:
        print("docs:", publish("cost", [text]))


if __name__ == "__main__":
    main()
