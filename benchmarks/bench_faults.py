"""How far what the audit calls a fault is from what sound layers show: other seeds than those of the tests.

    python benchmarks/bench_faults.py [--docs]

Small models, dense and a mixture, trained on the source of argparse from seeds that no test uses, under end_to_end with
two faults planted: nearest rounding in one module's dgrad, a scale that rounds down in another's input. All other
layers are sound. docs/audit.md says what the limits are. About a minute on a quiet core.
"""

from __future__ import annotations

import argparse

import torch
from rich.progress import track
from timing import parser, publish, show, write_rows

import fp4ext
from fp4ext import Dgrad, Fprop, Recipe, Spec, policies
from fp4ext.audit.layer import DRIFT
from fp4ext.audit.operand import measured, observe
from fp4ext.audit.report import SATURATION, UNDERFLOW
from fp4ext.testing import generate
from fp4ext.train import Preset, Shape, data
from fp4ext.train.models.transformer import Transformer
from fp4ext.train.pretraining.arm import Arm

SEEDS = (101, 102, 103)
DENSE = Preset(
    "dense", Shape(layers=2, d=64, heads=2, ffn=128, context=64), steps=30, batch=8, lr=4e-3, min_lr=1e-3, warmup=4
)
MIXTURE = DENSE.with_(
    name="mixture", shape=Shape(layers=2, d=64, heads=2, ffn=32, context=64, experts=4, top_k=2, expert_ffn=48)
)
PLANTED = {
    "dense": ("blocks.0.mlp.down", "blocks.1.mlp.gate_up"),
    "mixture": ("blocks.0.mlp.experts", "blocks.1.mlp.shared.down"),
}
RULES = ("nvfp4/amax", "nvfp4/four_over_six", "nvfp4/sweep", "mxfp4/ceil", "mxfp4/floor", "mxfp8")
KINDS = ("gaussian", "student_t3", "outliers30", "outliers100")


def planted(biased: str, saturating: str) -> fp4ext.Policy:
    """end_to_end with two faults."""
    policy = policies.get("end_to_end")
    sound = policy.pretrain
    drifts = Recipe(
        sound.fprop, Dgrad(Spec("nvfp4"), Spec("nvfp4", rounding="stochastic"), from_fprop=True), sound.wgrad
    )
    cuts = Recipe(Fprop(Spec("mxfp4", "floor"), sound.fprop.w), sound.dgrad, sound.wgrad)
    return policy.with_(name="planted", rules=((biased, drifts), (saturating, cuts)))


def trained(preset: Preset, seed: int):
    """A model after a short run, and batches."""
    corpus = data.load([argparse.__file__], preset.shape.context)
    arm = Arm("bf16", preset, seed, torch.device("cpu"))
    for step in range(preset.steps):
        arm.step(*corpus.batch(seed, step, preset.batch, preset.shape.context), step)
    model = Transformer(preset.shape)
    model.load_state_dict(arm.model.state_dict())
    return model, [corpus.batch(seed + 1, i, 4, preset.shape.context) for i in range(2)]


def judged(preset: Preset, seed: int) -> dict:
    """One model: its planted faults, and what all other layers show."""
    model, batches = trained(preset, seed)
    biased, saturating = PLANTED[preset.name]
    policy = planted(biased, saturating)
    report = fp4ext.audit.measure(model, batches, [policy], draws=12, tokens=256)
    sick = lambda module: module.startswith((biased, saturating))  # noqa: E731
    sound = [row for row in report.rows["planted"] if not sick(row.module)]
    gradients = [row.measured for row in sound if row.gemm != "fprop"]
    mine = [f for f in report.faults if sick(f.module)]
    return {
        "model": preset.name,
        "seed": seed,
        "rows": len(sound),
        "false": len(report.faults) - len(mine),
        "floor": max(m.law.floor.low for m in gradients),
        "saturation": max(row.measured.saturation for row in sound),
        "underflow": max(row.measured.underflow for row in sound),
        "found": sorted({(f.module, f.kind) for f in mine}),
        "planted_floor": min(f.size for f in mine if f.kind == "drift"),
        "planted_saturation": min(f.size for f in mine if f.kind == "saturation"),
    }


def main() -> None:
    p = parser(__doc__.splitlines()[0])
    p.set_defaults(threads=1)  # tensors this small are not worth two
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    runs = [(preset, seed) for preset in (DENSE, MIXTURE) for seed in SEEDS]
    rows = [judged(*run) for run in track(runs, description="models")]
    cells = [
        [
            f"{r['model']}, {r['seed']}",
            str(r["rows"]),
            str(r["false"]),
            f"{r['floor']:.1e}",
            f"{r['saturation']:.1%}",
            f"{r['underflow']:.1%}",
            f"{r['planted_floor']:.1e}",
            f"{r['planted_saturation']:.0%}",
        ]
        for r in rows
    ]
    columns = ["model, seed", "rows", "false faults", "lower end of the largest floor", "saturation", "underflow"]
    columns += ["planted drift", "planted saturation"]
    title = f"Sound layers and planted faults; the limits are {DRIFT:g}, {SATURATION:.0%} and {UNDERFLOW:.0%}"
    blocks = [show(title, columns, cells)]
    shares = []
    for key in RULES:
        xs = [generate(kind, 256, 1024, seed=104) for kind in KINDS]
        found = [measured([observe(x, Spec.parse(key), -1, "x", {"x": x})])[1].saturation for x in xs]
        shares.append([key, *(f"{share:.2%}" for share in found)])
    blocks.append(show("Share of blocks that saturate, by rule and data", ["rule", *KINDS], shares))
    print("rows:", write_rows("faults", rows))
    if args.docs:
        print("docs:", publish("faults", blocks))


if __name__ == "__main__":
    main()
