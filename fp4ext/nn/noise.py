"""gradient_noise: how much of each layer's weight gradient is rounding noise, and whether it still helps.

Two backward passes over the same batch differ in their random bits alone. With unbiased rounding g₁ = g + n₁ and
g₂ = g + n₂, n₁ and n₂ independent, so

    ‖n‖² ≈ ‖g₁ − g₂‖²/2,    ‖g‖² ≈ ‖(g₁ + g₂)/2‖² − ‖n‖²/2.

A gradient stops helping once ‖g‖ < √3·‖n‖ (the √3 rule of "FP4 All the Way", arXiv 2505.19115): then it is time for a
backward in more bits, a larger batch, or the end of the run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import Refused
from .dense import Linear
from .experts import Experts, StacksByPolicy
from .packed_layers import QuantizedStacked
from .transformers_experts import Stacked

SQRT3 = math.sqrt(3)


def gradient_noise(model: nn.Module, loss: Callable[[], Tensor], warn: bool = True) -> dict[str, float]:
    """‖g‖/‖noise‖ of the weight gradient of each converted layer, on one batch.

    Args:
        model: a model with layers that fp4ext.convert made; its gradients (.grad) are not touched.
        loss: computes the loss of one and the same batch, anew at each call, e.g. lambda: model(x, y). Dropout and the
            like must be off.
        warn: warn of the layers under √3.

    Returns:
        Layer name → ratio, and for experts the name of each of their two stacks; inf where the backward has no noise.
        Layers whose weights need no gradient are left out.

    Raises:
        ValueError: no layer of the model is converted.
    """
    layers = {name: w for name, w in weights(model).items() if w.requires_grad}
    if not layers:
        raise Refused("the model has no converted layer whose weight needs a gradient; accepted: a converted model")
    first, second = (torch.autograd.grad(loss(), list(layers.values())) for _ in range(2))
    ratios = {name: _ratio(a.double(), b.double()) for name, a, b in zip(layers, first, second, strict=True)}
    under = {name: ratio for name, ratio in ratios.items() if ratio < SQRT3}
    if warn and under:
        listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(under.items(), key=lambda item: item[1]))
        warnings.warn(
            f"rounding noise outweighs the gradient (norm of gradient / norm of noise under √3) in {len(under)} of "
            f"{len(ratios)} layers: {listed}; more bits in their backward or a larger batch would help",
            stacklevel=2,
        )
    return ratios


def is_mixture(module: nn.Module) -> bool:
    """Whether these are converted experts that train: not those whose stacks are packed."""
    return isinstance(module, (Experts, Stacked)) and not isinstance(module, QuantizedStacked)


def weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of converted layers, [N, K] by the layer's name, stacks of experts by "layer.parameter"."""
    found: dict[str, nn.Parameter] = {}
    for name, m in model.named_modules():
        if isinstance(m, Linear):
            found[name] = m.get_parameter("weight")
        elif isinstance(m, StacksByPolicy) and is_mixture(m):
            for stack in m.stacks:
                found[f"{name}.{stack}" if name else stack] = m.get_parameter(stack)
    return found


def _ratio(a: Tensor, b: Tensor) -> float:
    noise = ((a - b).square().sum() / 2).item()
    signal = (((a + b) / 2).square().sum()).item() - noise / 2
    return math.sqrt(max(signal, 0.0) / noise) if noise else math.inf
