"""pack: a model for inference, whose converted layers hold their weights quantized once and nothing else.

    packed = pack(model)     4.5 bits a weight (quantized.py); the model keeps its master weights
    packed(x)                in stage "rl_sampler": the bits of model(x), which quantizes its weights at every call
    refit(packed, model)     after the model has learned: new codes in the same memory

Nothing here knows what the model is: attention and the layers that stay plain have to be row-invariant by themselves.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from .experts import Experts
from .grouped import grouped_quantize
from .linear import Linear
from .policy import check_stage
from .qtensor import QTensor
from .quantize import quantize
from .quantized import QuantizedExperts, QuantizedLinear


def pack(model: nn.Module, stage: str = "rl_sampler") -> nn.Module:
    """A copy of the model, in eval mode and without gradients, whose converted layers are quantized.

    fp4ext.Linear becomes QuantizedLinear, fp4ext.Experts QuantizedExperts. Layers whose recipe quantizes no weights in
    that stage are copied as they are.

    Raises:
        ValueError: an unknown stage, a recipe that rounds weights at random.
    """
    check_stage(stage)
    # deepcopy takes what is in the memo for a copy that it has made already, so master weights are never copied.
    memo = {id(m): _packed(m, stage) for m in model.modules() if _packs(m, stage)}
    return copy.deepcopy(model, memo).eval().requires_grad_(False)


def packed_weights(model: nn.Module) -> list[QTensor]:
    """The matrices that a model holds as codes."""
    kinds = (QuantizedLinear, QuantizedExperts)
    return [w for m in model.modules() if isinstance(m, kinds) for w in m.weights]


@torch.no_grad()
def refit(packed: nn.Module, model: nn.Module, stage: str = "rl_sampler") -> None:
    """Give a packed copy the present weights of its model, in place: nothing is allocated but one layer's codes.

    Raises:
        ValueError: a module of the copy that the model lacks.
    """
    modules = dict(model.named_modules())
    for name, module in packed.named_modules():
        if name not in modules:
            raise ValueError(f"the model has no {name!r}; accepted: the model that was packed")
        # A quantized layer's tensors are buffers of the same names, made anew.
        theirs = _packed(modules[name], stage) if _packs(modules[name], stage) else modules[name]
        for key, t in (module._parameters | module._buffers).items():
            if t is not None:
                t.copy_((theirs._parameters | theirs._buffers)[key])


def _packs(module: nn.Module, stage: str) -> bool:
    return isinstance(module, (Linear, Experts)) and module.recipes[stage].fprop.w is not None


def _packed(module: Linear | Experts, stage: str) -> QuantizedLinear | QuantizedExperts:
    recipe = module.recipes[stage]
    x, w = recipe.fprop.x, recipe.fprop.w
    if recipe.needs_rng:
        raise ValueError(f"the recipe of stage {stage} is random ({w}); accepted: one that rounds weights to nearest")
    with torch.no_grad():
        if isinstance(module, Linear):
            bias = None if module.bias is None else module.bias.detach().clone()
            return QuantizedLinear(quantize(module.weight, w, role="w"), bias, x)
        stacks = (grouped_quantize(t, w, role="w") for t in (module.gate_up_proj, module.down_proj))
        return QuantizedExperts(*stacks, x)
