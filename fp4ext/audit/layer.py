"""judge: measure one layer under one recipe: its six operands, and its products y, dx and dw by the layer's own code.
Each expert's matrices are quantized on their own; the numbers of a layer of experts are over all of them.

A backward GEMM has two possible references: the gradient of y = x·wᵀ, or that of the computed forward y = x̂·ŵᵀ, at
which NVIDIA's 16×16 weights and `from_fprop` aim. Each operand and product is compared with the reference that it is
closer to on average; `of` names it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..functional.qtensor import QTensor
from ..functional.quantization import quantize
from ..policy.recipe import Recipe
from ..policy.spec import Spec
from .capture import Layer
from .operand import DRAWS, ENTRIES, Draws, Measured, measured, nearest, observe, sampled

DRIFT = 1e-4  # of a gradient's energy: a bias of 1 % of its norm
HAT = "\u0302"  # combines with the letter before it: what the forward quantized
GEMMS = ("fprop", "dgrad", "wgrad")
PRODUCTS = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}


@dataclass(frozen=True)
class Row:
    """One operand or product of one layer.

    Attributes:
        module: the layer's name; of experts, with the parameter's.
        gemm: "fprop", "dgrad" or "wgrad".
        what: the operand "x", "w" or "dy", or the product "y", "dx" or "dw".
        spec: the operand's Spec; None for products.
        of: the reference, such as "w" or "ŵ".
        measured: the measurements.
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

    @property
    def drifts(self) -> bool:
        """Whether it is part of the backward, and its mean over draws differs significantly from the reference."""
        law = self.measured.law
        return self.gemm != "fprop" and law.drifts and law.floor.low > DRIFT


def judge(layer: Layer, recipe: Recipe, draws: int = DRAWS) -> list[Row]:
    """The rows of a layer: its quantized operands, then its products.

    Args:
        draws: how often random operands and products are drawn.
    """
    return [*operands(layer, recipe, draws), *products(layer, recipe, draws)]


def operands(layer: Layer, recipe: Recipe, draws: int = DRAWS) -> list[Row]:
    """A row for each operand that the recipe quantizes; the matrices of all experts count together."""
    x = layer.x - layer.x.mean(0) if recipe.mean_split else layer.x
    plain = {"x": layer.each(x), "w": layer.each(layer.w), "dy": layer.each(layer.dy)}
    stored = {role: [_forward(t, spec) for t in plain[role]] for role, spec in vars(recipe.fprop).items()}
    rows = []
    for gemm in GEMMS:
        for role, spec in vars(getattr(recipe, gemm)).items():
            if not isinstance(spec, Spec):
                continue
            axis = -1 if gemm == "fprop" or (gemm, role) == ("dgrad", "dy") else -2
            seen = []
            for i, t in enumerate(plain[role]):
                if not t.numel():  # an expert without rows
                    continue
                kept = stored[role][i] if role in stored else t
                forward = gemm != "fprop" and isinstance(kept, QTensor)
                source = kept if forward and getattr(recipe, gemm).from_fprop else t
                truths = {role: t} | ({role + HAT: _restored(kept)} if forward else {})
                seen.append(observe(source, spec, axis, role, truths, draws, ENTRIES // layer.experts))
            if seen:
                rows.append(Row(layer.name, gemm, role, spec, *measured(seen)))
    return rows


def products(layer: Layer, recipe: Recipe, draws: int = DRAWS) -> list[Row]:
    """Rows for y, dx and dw, from repeated runs of the layer's own forward and backward."""
    x, w, dy = layer.x, layer.w, layer.dy
    mean = x.mean(0) if recipe.mean_split else 0.0
    hat = {
        "x": torch.cat([_restored(_forward(t, recipe.fprop.x)) for t in layer.each(x - mean)]) + mean,
        "w": torch.stack([_restored(_forward(t, recipe.fprop.w)) for t in layer.each(w)]).view(w.shape),
    }
    given = {"x": x, "w": w, "dy": dy, "x" + HAT: hat["x"], "w" + HAT: hat["w"]}
    wide = {name: layer.each(t.double()) for name, t in given.items()}
    dot = lambda a, b: [p @ q for p, q in zip(a, b, strict=True)]  # noqa: E731
    turned = lambda ts: [t.mT for t in ts]  # noqa: E731
    truths = {
        "y": {"x·w": torch.cat(dot(wide["x"], turned(wide["w"])))},
        "dx": {f"dy·{of}": torch.cat(dot(wide["dy"], wide[of])) for of in ("w", "w" + HAT)},
        "dw": {f"dy·{of}": torch.cat(dot(turned(wide["dy"]), wide[of])) for of in ("x", "x" + HAT)},
    }
    collected = {what: {of: Draws(_some(t)) for of, t in candidates.items()} for what, candidates in truths.items()}
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for draw in range(draws if recipe.needs_rng else 1):
            torch.manual_seed(draw)
            y = layer.product(*leaves, recipe)
            dx, dw = torch.autograd.grad(y, leaves, dy)
            for what, value in {"y": y.detach(), "dx": dx, "dw": dw}.items():
                value = _some(value.flatten(0, -2))
                for candidate in collected[what].values():
                    candidate.add(value)
    rows = []
    for gemm, what in PRODUCTS.items():
        found = {of: each.measured() for of, each in collected[what].items()}
        of = nearest(found)
        rows.append(Row(layer.name, gemm, what, None, of, found[of]))
    return rows


def _forward(t: Tensor, spec: Spec | None) -> QTensor | Tensor:
    """What the forward keeps of an operand: the operand itself if it is not quantized, or quantized at random."""
    return quantize(t, spec, rng=0) if spec and not spec.needs_rng else t


def _restored(kept: QTensor | Tensor) -> Tensor:
    return kept.dequantize(torch.float32) if isinstance(kept, QTensor) else kept


def _some(product: Tensor) -> Tensor:
    return product[sampled(*product.shape)]
