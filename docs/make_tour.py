"""Writes docs/tour.md and its pictures: every number and curve in it comes from the library, on real tensors.

python docs/make_tour.py        (or: make tour; about a minute)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import fp4ext
from fp4ext import Spec
from fp4ext.audit import advise, explain, machines
from fp4ext.audit.capture import capture
from fp4ext.audit.cost_model import Shape, cost
from fp4ext.audit.operand import measure
from fp4ext.testing import generate
from fp4ext.train import Preset, data
from fp4ext.train import Shape as ModelShape
from fp4ext.train.pretraining.arm import Arm

HERE = Path(__file__).parent
PICTURES = HERE / "tour"
PRESET = Preset(
    "tour", ModelShape(layers=2, d=128, heads=4, ffn=256, context=64), steps=60, batch=8, lr=3e-3, min_lr=3e-4, warmup=6
)
RULES = {
    "nearest": "nvfp4/amax",
    "stochastic": "nvfp4/amax/stochastic",
    "stochastic, minvar": "nvfp4/minvar/stochastic",
    "MS-EDEN, one stage": "nvfp4/amax/eden/1x16/tensor/128",
    "MS-EDEN + sweep, two stages": "nvfp4/sweep/eden/1x16/tensor/128x2",
}
EIGHT = Shape("8B", layers=32, d=4096, heads=32, kv_heads=8, ffn=14336, context=8192, vocab=128256)


def real_tensors():
    """A model after a short run on the source of argparse, batches, and what its layers read and are told."""
    corpus = data.load([argparse.__file__], PRESET.shape.context)
    arm = Arm("bf16", PRESET, 0, torch.device("cpu"))
    for step in range(PRESET.steps):
        line = arm.step(*corpus.batch(0, step, PRESET.batch, PRESET.shape.context), step)
    batches = [corpus.batch(1, i, PRESET.batch, PRESET.shape.context) for i in range(2)]
    fp4ext.revert(arm.model)
    for module in arm.model.modules():  # plain products again, where the arm had its own
        if isinstance(module, torch.nn.Linear):
            module.__class__ = torch.nn.Linear
    names = [n for n, m in arm.model.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"]
    return arm.model, batches, capture(arm.model, batches, names), line["train_loss"]


def once_and_a_thousand_times() -> explain.Rounded:
    r = explain.rounded(3.2, (3.0, 4.0))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(1, 2))
    left.bar(["3", "4"], [r.draws[1], r.draws[0]], color="C0")
    left.set(title="3.2, rounded stochastically", ylabel="times of 1000")
    right.semilogx(range(1, 1001), explain.running_means(r, 1000), label="stochastic")
    right.semilogx([1, 1000], [r.nearest] * 2, label="nearest")
    right.axhline(3.2, color="black", linestyle=":", linewidth=1, label="3.2")
    right.set(xlabel="numbers averaged", ylabel="mean")
    right.legend(frameon=False)
    save(figure, "rounding")
    return r


def averages(tensors: dict[str, torch.Tensor]) -> dict:
    """(title, rule) → Measured; the curves, for each tensor."""
    figure, axes = plt.subplots(1, len(tensors), figsize=(9, 3.8), sharey=True)
    found = {}
    for axis, (title, x) in zip(axes, tensors.items(), strict=True):
        for name, key in RULES.items():
            m = found[title, name] = measure(x, Spec.parse(key), -1, "x", {"x": x}, draws=64)[1]
            if m.law.draws == 1:
                axis.axhline(m.mse, color="black", linewidth=1, label=name)
            else:
                (line,) = axis.loglog(*zip(*m.law.curve, strict=True), marker=".", label=name)
                b = [2**i for i in range(9)]
                axis.loglog(b, [m.law.err(i) for i in b], color=line.get_color(), alpha=0.4, linewidth=1)
        axis.set(title=title, xlabel="draws averaged, B")
    axes[0].set_ylabel("relative error of the mean")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, "averages")
    return found


def block_scales(x: torch.Tensor) -> tuple[list, dict]:
    """One real block under three rules, and the error of more rules on the whole tensor."""
    values = x[0, :16].tolist()
    figure, axis = plt.subplots(figsize=(9, 2.6))
    blocks = [explain.block(values, Spec("nvfp4", rule)) for rule in ("amax", "four_over_six", "sweep")]
    for row, b in enumerate(blocks):
        grid = sorted({s * g * b.scale for g in explain.E2M1_GRID for s in (-1, 1)})
        axis.plot(grid, [row] * len(grid), "|", markersize=16, color="grey")
        axis.plot(values, [row + 0.18] * 16, "v", markersize=4, color="C0")
        axis.plot(b.images, [row - 0.18] * 16, "^", markersize=4, color="C1")
    axis.set(yticks=range(3), yticklabels=[f"{b.spec.scale}\n{1e3 * b.error:.2f}e-3" for b in blocks])
    axis.set_title("16 activations (above) and their images (below) on the grid that each scale gives", fontsize=10)
    save(figure, "scales")
    rules = ("mxfp4", "nvfp4/amax", "nvfp4/four_over_six", "nvfp4/sweep", "mxfp8")
    return blocks, {key: measure(x, Spec.parse(key), -1, "x", {"x": x})[1].mse for key in rules}


def prices() -> dict:
    machine = machines.get("gb300")
    policies = ("bf16", "mxfp8", "nvidia", "quartet2", "end_to_end")
    found = {p: cost(EIGHT, p, machine, gpus=512, batch_tokens=16 << 20) for p in policies}
    parts = {
        "products": lambda n: n in ("fprop", "dgrad", "wgrad"),
        "quantizers": lambda n: n.startswith("quantize"),
        "attention, head, norms, optimizer": lambda n: n in ("attention", "head", "norms and SwiGLU", "optimizer"),
    }
    figure, axis = plt.subplots(figsize=(9, 3))
    left = [0.0] * len(policies)
    for name, which in parts.items():
        times = [1e3 * sum(t.seconds for t in c.terms if which(t.name)) for c in found.values()]
        axis.barh(policies, times, left=left, label=name)
        left = [a + b for a, b in zip(left, times, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("ms a step and GPU, by data sheet at 70 %; not measured")
    axis.legend(frameon=False, fontsize=8)
    save(figure, "prices")
    return found


def save(figure, name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(PICTURES / f"{name}.png", dpi=110)
    plt.close(figure)


def ranked(scores) -> str:
    lines = ["| candidate | error ×1e3 | floor ×1e3 | faulty layers |", "|---|---:|---:|---:|"]
    return "\n".join(
        lines + [f"| {s.name} | {1e3 * s.error:.3f} | {1e3 * s.drift:.3f} | {len(s.faults)} |" for s in scores]
    )


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batches, layers, loss = real_tensors()
    layer = layers["blocks.1.mlp.gate_up"]
    r = once_and_a_thousand_times()
    outliers = generate("outliers30", 64, 512, seed=2)
    curves = averages({"a real gradient (dy)": layer.dy, "outliers ×30": outliers})
    blocks, errors = block_scales(layer.x)
    paid = prices()
    advice = advise(model, batches, "error", machine=machines.get("gb300"), draws=8, tokens=256, most=4, budget=0.02)
    low, high = curves["outliers ×30", "MS-EDEN, one stage"], curves["outliers ×30", "MS-EDEN + sweep, two stages"]
    near, random = (curves["a real gradient (dy)", name] for name in ("nearest", "MS-EDEN + sweep, two stages"))
    table = "\n".join(f"| {key} | {1e3 * error:.3f} |" for key, error in errors.items())
    bits = {f.name: f.bits_per_element for f in fp4ext.formats.FORMATS.values()}
    busy = {p: sum(t.seconds for t in c.terms) for p, c in paid.items()}
    own = {p: c.overhead * c.seconds / busy[p] for p, c in paid.items()}
    steps = ", ".join(f"{p} {1e3 * busy[p]:.0f} ms (quantizers {own[p]:.0%})" for p in paid)
    exchange = 1e3 * paid["bf16"].exchange.seconds
    once = r.expected_error * sum(r.draws) ** 0.5
    text = f"""\
# A tour: noise, drift and what a bit costs

Written by `python docs/make_tour.py`, pictures and numbers; the real tensors are of a small transformer ({PRESET.steps} steps on the source of
argparse, training loss {loss:.2f} nat/byte).

## Once, and a thousand times

`python -m fp4ext explain 3.2 --grid 3,4`. Nearest rounding takes 3.2 to {r.nearest:g}, always. Stochastic rounding takes it to 4 with
probability {r.up:.1f}, to 3 otherwise; of 1000 roundings {r.draws[0]} went up, and their mean is {r.mean:.3f}.

![3.2 rounded a thousand times](tour/rounding.png)

Once, nearest is better: its error is 0.2, where stochastic rounding errs by {once:.1f} as root mean square. A thousand times, it still errs by 0.2,
where stochastic rounding errs by about {r.expected_error:.3f}.

## Averages forgive noise, and keep drift

A gradient is a mean over tokens, and training a mean over steps. If a draw errs by noise of variance V and a drift d that all draws share, then

    err(B) = V/B + ‖d‖²

and the audit fits this law to repeated draws. On a real gradient all of nearest rounding's error, {1e3 * near.mse:.2f}e-3, stays. MS-EDEN + sweep on two
stages errs by {1e3 * random.mse:.2f}e-3 once, with a floor of {1e3 * random.law.floor.mean:.4f}e-3 (95 %: {1e3 * random.law.floor.low:.4f} to {1e3 * random.law.floor.high:.4f}).

![Error of the mean of B draws](tour/averages.png)

Points are measured, faint lines are the fit. With outliers one stage of MS-EDEN flattens out: of its error of {1e3 * low.mse:.2f}e-3 a floor of
{1e3 * low.law.floor.mean:.3f}e-3 stays, B·err(B)/err(1) = {low.law.ratio.mean:.1f} at B = 256, where two stages have {high.law.ratio.mean:.2f}. That is why the policy `end_to_end` has two.

## The block's scale

Sixteen NVFP4 elements share a scale, and the scale decides where the grid's eight magnitudes fall. `amax` puts the largest element on 6;
`four_over_six` may put it on 4; `sweep` tries five scales and keeps the one that errs least.

![One block on three grids](tour/scales.png)

On the whole activation tensor of that layer, relative error:

| rule | error ×1e3 |
|---|---:|
{table}

## What each stage asks for

Measured by `fp4ext.audit.advise` on this model, the best on error first; one that is faulty (drift, saturation, underflow) in more than a quarter of the layers comes last.
Pretraining, forward:

{ranked(advice.ranked["forward"])}

Pretraining, backward:

{ranked(advice.ranked["backward"])}

The proposal in 4 bits is {"the policy `end_to_end`" if advice.policy.pretrain == fp4ext.policies.get("end_to_end").pretrain else "another than `end_to_end`"}: swept scales forward, an unbiased backward of the forward's own operands. A sampler takes the
forward with an outer scale for each row of x, so that a row's codes do not depend on its batch mates; a trainer in reinforcement learning takes the
sampler's operands exactly.

## What it costs

Stored bits an element: NVFP4 {bits["nvfp4"]}, MXFP8 {bits["mxfp8"]}, BF16 16. On paper, by a data sheet (`python -m fp4ext cost`; no GPU was measured), a step of
an 8B model on 512 GB300s, 32,768 tokens a GPU, takes: {steps}.
Meanwhile {exchange:.0f} ms go by for the exchange of weights and gradients, which the model overlaps: where a step is shorter, the network binds.

![Time of a step by policy](tour/prices.png)

Where products run at 15 PFLOP/s, quantizers that try five scales and rotate twice are no small part of a step: a policy chooses them operand by operand.
"""
    (HERE / "tour.md").write_text(text)
    print(
        f"written: {HERE / 'tour.md'}, {', '.join(p.name for p in sorted(PICTURES.glob('*.png')))}; blocks {len(blocks)}"
    )


if __name__ == "__main__":
    main()
