"""Error and bias of every quantizer: the table of docs/numerics.md, 8, measured, and the averaging curves.

    python benchmarks/bench_error.py [--draws 256] [--docs]

Relative MSE ×1e3 on N(0, 1), 1024×2048, the error taken in fp64. B·err(mean of B)/err(1) stays at 1 for an unbiased
quantizer and grows with B where there is a bias: averages forgive noise and keep drift.
"""

from __future__ import annotations

import torch
from rich.progress import track
from timing import DOCS, parser, publish, show, write_rows

from fp4ext import Spec
from fp4ext.functional import ops
from fp4ext.reference import hadamard
from fp4ext.testing import generate

TARGETS = {
    "nvfp4/amax": 9.035,
    "nvfp4/four_over_six": 7.549,
    "nvfp4/four_over_six_mae": 7.78,
    "nvfp4/four_over_six_absmax": 7.97,
    "nvfp4/sweep": 6.69,
    "nvfp4/amax/nearest/16x16": 12.39,
    "nvfp4/four_over_six/nearest/16x16": 12.38,
    "mxfp4/floor": 13.23,
    "mxfp4/ceil": 13.3,
    "mxfp8/floor": 0.862,
    "mxfp8/ceil": 0.705,
    "nvfp4/amax/stochastic": 22.21,
    "nvfp4/minvar/stochastic": 18.6,
    "nvfp4/amax/eden_block/1x16/tensor/128": 9.33,
    "nvfp4/amax/eden/1x16/tensor/128": 9.76,
    "nvfp4/amax/eden/1x16/tensor/128x2": None,
    "nvfp4/sweep/eden/1x16/tensor/128": 7.15,
    "nvfp4/sweep/eden/1x16/tensor/128x2": 7.15,
}
BIAS = (
    "nvfp4/amax/stochastic",
    "nvfp4/minvar/stochastic",
    "nvfp4/amax/eden_block/1x16/tensor/128",
    "nvfp4/amax/eden/1x16/tensor/128",
    "nvfp4/amax/eden/1x16/tensor/128x2",
    "nvfp4/sweep/eden/1x16/tensor/128",
    "nvfp4/sweep/eden/1x16/tensor/128x2",
)
DATA = ("gaussian", "student_t3", "outliers30", "outliers100", "one_hot")


def estimate(x: torch.Tensor, spec: Spec, seed: int) -> torch.Tensor:
    """x̂ in fp64. A rotated x̂ is rotated back, which changes no error: the transform is orthogonal."""
    rng = torch.tensor([seed, 0])
    codes, scales, outer = ops.quantize(x, spec.key, -1, rng)
    y = ops.dequantize(codes, scales, outer, spec.format, x.shape[-1], "float32").double()
    return y if spec.rht == "none" else hadamard.inverse_rht(y, *hadamard.parse(spec.rht), rng)


def relative_mse(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((y - x.double()).square().sum() / x.double().square().sum()).item()


def averaging(x: torch.Tensor, spec: Spec, draws: int) -> tuple[list[int], list[float]]:
    """(B, relative MSE of the mean of B draws) for B = 1, 2, 4, … draws."""
    total, at, sizes, errors = torch.zeros_like(x, dtype=torch.float64), 1, [], []
    for b in range(1, draws + 1):
        total += estimate(x, spec, 1000 + b)
        if b == at:
            sizes.append(b)
            errors.append(relative_mse(x, total / b))
            at *= 2
    return sizes, errors


def main() -> None:
    p = parser(__doc__.splitlines()[0])
    p.add_argument("--draws", type=int, default=256, help="B of the averages (default 256)")
    args = p.parse_args()
    torch.set_num_threads(args.threads)

    x = generate("gaussian", 1024, 2048, seed=1)
    rows, cells = [], []
    for key, target in TARGETS.items():
        error = 1e3 * relative_mse(x, estimate(x, Spec.parse(key), 1))
        wanted = [f"{target}", f"{error / target - 1:+.1%}"] if target else ["–", "–"]
        cells.append([key, f"{error:.3f}", *wanted])
        rows.append({"kind": "error", "spec": key, "mse_1e3": error, "target": target})
    blocks = [show("Relative MSE ×1e3 on N(0, 1), 1024×2048", ["spec", "measured", "must be", "off by"], cells)]

    curves, cells = {}, []
    for key in track(BIAS, description="averaging"):
        cells.append([key])
        for data in DATA:
            sizes, errors = averaging(generate(data, 64, 512, seed=2), Spec.parse(key), args.draws)
            curves[key, data] = sizes, errors
            # One-hot rows of ±1 are exact under stochastic rounding: nothing to average.
            ratio = sizes[-1] * errors[-1] / errors[0] if errors[0] else 0.0
            cells[-1].append(f"{ratio:.2f}" if errors[0] else "exact")
            rows.append({"kind": "bias", "spec": key, "data": data, "draws": sizes[-1], "ratio": ratio})
    title = f"B·err(mean of B)/err(1) at B = {args.draws}: 1 is unbiased, more is drift"
    blocks.append(show(title, ["spec", *DATA], cells))
    print("rows:", write_rows("error", rows))
    if args.docs:
        path = publish("error", [*blocks, "![Averaging curves](averaging.png)\n"])
        plot(curves, DOCS / "averaging.png")
        print("docs:", path)


def plot(curves: dict, path) -> None:
    """The averaging curves: relative MSE of the mean of B draws against B."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = ("gaussian", "outliers30")
    figure, axes = plt.subplots(1, len(shown), figsize=(10, 4), sharey=True)
    for ax, data in zip(axes, shown, strict=True):
        for key in BIAS:
            sizes, errors = curves[key, data]
            ax.loglog(sizes, errors, marker=".", label=key.removeprefix("nvfp4/").replace("/1x16/tensor/", " "))
        first = curves[BIAS[0], data]
        ax.loglog(first[0], [first[1][0] / b for b in first[0]], "k:", linewidth=1, label="err(1)/B")
        ax.set(title=data, xlabel="draws averaged, B")
    axes[0].set_ylabel("relative MSE of the mean")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
