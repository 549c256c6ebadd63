"""judge: one layer under one recipe: its six operands, and its products y, dx, dw through the layer's own code.

What is the truth of a backward GEMM? dgrad may serve either of two functions: the layer's, y = x·wᵀ, or the one that
the forward really computed, y = x̂·ŵᵀ. The gradient of either is honest (NVIDIA's 16×16 weights and `from_fprop` aim
at the second), so an operand, and a product, is held to the one that it comes closer to on average; `of` says which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linear import linear
from ..qtensor import QTensor
from ..quantize import quantize
from ..recipe import Recipe
from ..spec import Spec
from .capture import Layer
from .operand import DRAWS, Draws, Measured, measure, nearest, sampled

GEMMS = ("fprop", "dgrad", "wgrad")
PRODUCTS = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}


@dataclass(frozen=True)
class Row:
    """One operand or product of one layer.

    Attributes:
        module: the layer's name.
        gemm: "fprop", "dgrad" or "wgrad".
        what: the operand "x", "w" or "dy", or the product "y", "dx" or "dw".
        spec: the operand's Spec, None where it stays as it is and for products.
        of: what it was held to, e.g. "w" or "ŵ".
        measured: the numbers.
    """

    module: str
    gemm: str
    what: str
    spec: Spec | None
    of: str
    measured: Measured

    @property
    def is_product(self) -> bool:
        return self.what == PRODUCTS[self.gemm]


def judge(layer: Layer, recipe: Recipe, draws: int = DRAWS) -> list[Row]:
    """The rows of a layer: its quantized operands, then its products."""
    return [*operands(layer, recipe, draws), *products(layer, recipe, draws)]


def operands(layer: Layer, recipe: Recipe, draws: int = DRAWS) -> list[Row]:
    """A row for each operand that the recipe quantizes."""
    x = layer.x - layer.x.mean(0) if recipe.mean_split else layer.x
    plain = {"x": x, "w": layer.w, "dy": layer.dy}
    stored = {role: _forward(plain[role], spec) for role, spec in (("x", recipe.fprop.x), ("w", recipe.fprop.w))}
    rows = []
    for gemm in GEMMS:
        for role, spec in vars(getattr(recipe, gemm)).items():
            if not isinstance(spec, Spec):
                continue
            axis = -1 if gemm == "fprop" or (gemm, role) == ("dgrad", "dy") else -2
            kept = stored.get(role)
            forward = gemm != "fprop" and isinstance(kept, QTensor)
            source = kept if forward and getattr(recipe, gemm).from_fprop else plain[role]
            truths = {role: plain[role]}
            if forward:
                truths[role + HAT] = kept.dequantize(torch.float32)
            rows.append(Row(layer.name, gemm, role, spec, *measure(source, spec, axis, role, truths, draws)))
    return rows


def products(layer: Layer, recipe: Recipe, draws: int = DRAWS) -> list[Row]:
    """y, dx and dw, by repeated runs of the layer's own forward and backward."""
    x, w, dy = layer.x, layer.w, layer.dy
    hat = {
        role: _restored(_forward(t, spec), t) for role, t, spec in (("x", x, recipe.fprop.x), ("w", w, recipe.fprop.w))
    }
    if recipe.mean_split:
        mean = x.mean(0)
        hat["x"] = _restored(_forward(x - mean, recipe.fprop.x), x) + mean
    wide = {
        name: t.double() for name, t in {"x": x, "w": w, "dy": dy, "x" + HAT: hat["x"], "w" + HAT: hat["w"]}.items()
    }
    truths = {
        "y": {"x·w": wide["x"] @ wide["w"].T},
        "dx": {f"dy·{of}": wide["dy"] @ wide[of] for of in ("w", "w" + HAT)},
        "dw": {f"dy·{of}": wide["dy"].T @ wide[of] for of in ("x", "x" + HAT)},
    }
    collected = {what: {of: Draws(_some(t)) for of, t in candidates.items()} for what, candidates in truths.items()}
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for draw in range(draws if recipe.needs_rng else 1):
            torch.manual_seed(draw)
            y = linear(*leaves, None, recipe)
            dx, dw = torch.autograd.grad(y, leaves, dy)
            for what, value in {"y": y.detach(), "dx": dx, "dw": dw}.items():
                value = _some(value)
                for candidate in collected[what].values():
                    candidate.add(value)
    rows = []
    for gemm, what in PRODUCTS.items():
        found = {of: each.measured() for of, each in collected[what].items()}
        of = nearest(found)
        rows.append(Row(layer.name, gemm, what, None, of, found[of]))
    return rows


HAT = "\u0302"


def _forward(t: Tensor, spec: Spec | None) -> QTensor | Tensor:
    """What the forward keeps of an operand; as it is where it is not quantized, or in a frame of its own (RHT)."""
    return quantize(t, spec, rng=0) if spec and not spec.needs_rng else t


def _restored(kept: QTensor | Tensor, t: Tensor) -> Tensor:
    return kept.dequantize(torch.float32) if isinstance(kept, QTensor) else t


def _some(product: Tensor) -> Tensor:
    return product[sampled(*product.shape)]
