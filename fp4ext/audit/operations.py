"""The work of one linear layer as a list of primitive operations, as nn/dense.py performs them.

    fprop   y [T, N]   quantize x [T, K] and w [N, K],           T·N·K multiply-adds
    dgrad   dx [T, K]  quantize dy [T, N] and w along N,         T·K·N
    wgrad   dw [N, K]  quantize dy along T and x along T,        N·K·T

The time of an operation follows from a data sheet (machines.py) or from measurements (calibrate.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..policy import formats
from ..policy.recipe import Recipe
from ..policy.spec import Spec


@dataclass(frozen=True)
class Op:
    """One primitive operation.

    Attributes:
        kind: "quantize", "requantize", "dequantize" or "gemm".
        gemm: the GEMM that it is for: "fprop", "dgrad" or "wgrad".
        keys: the stored format, the Spec's key and the axis, as far as the kind has them; for a GEMM the operands'
            formats and the output's.
        work: the number of elements, or of multiply-adds.
        sizes: (rows, cols) or (M, N, K).
    """

    kind: str
    gemm: str
    keys: tuple[str, ...]
    work: int
    sizes: tuple[int, ...]


def of_layer(recipe: Recipe, t: int, n: int, k: int, backward: bool = True, weights_ready: bool = False) -> list[Op]:
    """The operations of a layer w [N, K] on t tokens under a recipe.

    Args:
        t, n, k: T tokens, N outputs, K inputs.
        backward: whether to include dgrad and wgrad.
        weights_ready: whether w is quantized already, as in a sampler.
    """
    made: list[Op] = []

    def quantize(gemm: str, spec: Spec | None, rows: int, cols: int, axis: int, kept: Spec | None = None) -> str:
        """Add the operation that makes an operand, from the forward's stored one if `kept`; return its format."""
        if spec is None:
            if kept:
                made.append(Op("dequantize", gemm, (kept.format,), rows * cols, (rows, cols)))
            return "bf16"
        kind, keys = ("requantize", (kept.format,)) if kept else ("quantize", ())
        made.append(Op(kind, gemm, (*keys, spec.key, str(axis)), rows * cols, (rows, cols)))
        return spec.format

    def gemm(name: str, a: str, b: str, sizes: tuple[int, int, int], out: str) -> None:
        made.append(Op("gemm", name, (a, b, out), sizes[0] * sizes[1] * sizes[2], sizes))

    f, d, w = recipe.fprop, recipe.dgrad, recipe.wgrad
    a = quantize("fprop", f.x, t, k, -1)
    b = (f.w.format if f.w else "bf16") if weights_ready else quantize("fprop", f.w, n, k, -1)
    gemm("fprop", a, b, (t, n, k), "bf16")
    if backward:
        a = quantize("dgrad", d.dy, t, n, -1)
        b = quantize("dgrad", d.w, n, k, -2, f.w if d.from_fprop or d.w is None else None)
        gemm("dgrad", a, b, (t, k, n), "bf16")
        a = quantize("wgrad", w.dy, t, n, -2)
        b = quantize("wgrad", w.x, t, k, -2, f.x if w.from_fprop or w.x is None else None)
        gemm("wgrad", a, b, (n, k, t), "fp32")
    return made


def bits(fmt: str) -> float:
    """Stored bits per element, block scales included."""
    return formats.get(fmt).bits_per_element if fmt in formats.FORMATS else {"bf16": 16.0, "fp32": 32.0}[fmt]


def moved(op: Op) -> float:
    """The bytes that an operation reads and writes at least."""
    if op.kind == "gemm":
        m, n, k = op.sizes
        a, b, out = op.keys
        return (m * k * bits(a) + n * k * bits(b) + m * n * bits(out)) / 8
    if op.kind == "quantize":
        # x twice: its amax first, where the format has an outer scale.
        spec = Spec.parse(op.keys[0])
        return op.work * (16 * (2 if spec.fmt.has_global_scale else 1) + bits(spec.format)) / 8
    if op.kind == "requantize":
        return op.work * (2 * bits(op.keys[0]) + bits(Spec.parse(op.keys[1]).format)) / 8
    return op.work * (bits(op.keys[0]) + 16) / 8


def arithmetic(spec: Spec) -> float:
    """fp32 operations per element of a quantizer, counted from docs/numerics.md and not measured.

    A candidate scale costs a multiplication, 3 operations to round and 3 for the error. Errors are of normalized
    elements, which costs one more multiplication. A Philox call of 10 rounds serves 8 elements. A butterfly costs one
    addition per element.
    """
    candidates = {"four_over_six": 2, "four_over_six_mae": 2, "four_over_six_absmax": 2, "sweep": 5, "minvar": 6}
    tried = (candidates | {"amax": 0, "ceil": 0, "floor": 0})[str(spec.scale)]
    count: float = 8 + 7 * tried  # magnitude, maximum, scale, multiply, round, pack
    if tried and spec.scale != "minvar":
        count += 1
    if spec.rounding == "stochastic":
        count += 10 * 7 / 8 + 3
    if spec.is_eden:
        count += 6  # S: an element normalized, two products, two sums, and the scale's rounding
    if spec.rht != "none":
        n, _, stages = str(spec.rht).partition("x")
        count += int(stages or 1) * (2 + int(n).bit_length() - 1) + (2 if stages else 0)
    return count
