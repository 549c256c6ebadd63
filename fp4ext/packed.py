"""pack: a model for inference, whose converted layers hold their weights quantized once and nothing else.

    packed = pack(model)     4.5 bits a weight; the model keeps its master weights
    packed(x)                in stage "rl_sampler": the bits of model(x), which quantizes its weights at every call
    refit(packed, model)     after the model has learned: new codes in the same memory

Nothing here knows what the model is: attention and the layers that stay plain have to be row-invariant by themselves.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from .experts import Experts, grouped_fprop
from .grouped import grouped_quantize
from .linear import Linear, fprop
from .policy import check_stage
from .qtensor import QTensor
from .quantize import quantize
from .recipe import Recipe


class PackedLinear(nn.Module):
    """What fp4ext.Linear computes in a stage without gradients, from weights quantized in advance.

    Args:
        linear: the layer to follow; it is not kept.
        stage: whose recipe.

    Raises:
        ValueError: an unknown stage, or a recipe that leaves weights as they are or rounds them at random.
    """

    def __init__(self, linear: Linear, stage: str = "rl_sampler"):
        super().__init__()
        self.recipe = _recipe(linear, stage)
        self.weight = self._quantized(linear)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def _quantized(self, linear: Linear) -> QTensor:
        return quantize(linear.weight, self.recipe.fprop.w, role="w")

    @torch.no_grad()
    def refit(self, linear: Linear) -> None:
        """Take over the layer's present weights, in place."""
        self.weight = _rewritten(self.weight, self._quantized(linear))
        if self.bias is not None:
            self.bias.copy_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return fprop(x, self.weight, self.bias, self.recipe)

    @property
    def weights(self) -> list[QTensor]:
        """The packed matrices."""
        return [self.weight]

    def extra_repr(self) -> str:
        return repr(self.weight)


class PackedExperts(nn.Module):
    """What fp4ext.Experts computes in a stage without gradients, from weights quantized in advance.

    Args, Raises: as PackedLinear.
    """

    def __init__(self, experts: Experts, stage: str = "rl_sampler"):
        super().__init__()
        self.recipe = _recipe(experts, stage)
        self.gate_up_proj, self.down_proj = self._quantized(experts)

    def _quantized(self, experts: Experts) -> list[QTensor]:
        return [grouped_quantize(w, self.recipe.fprop.w, role="w") for w in (experts.gate_up_proj, experts.down_proj)]

    @torch.no_grad()
    def refit(self, experts: Experts) -> None:
        """Take over the present weights, in place."""
        new = self._quantized(experts)
        self.gate_up_proj, self.down_proj = map(_rewritten, self.weights, new)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        gate, up = grouped_fprop(x, self.gate_up_proj, offsets, self.recipe).chunk(2, dim=-1)
        return grouped_fprop(nn.functional.silu(gate) * up, self.down_proj, offsets, self.recipe)

    @property
    def weights(self) -> list[QTensor]:
        """The packed matrices."""
        return [self.gate_up_proj, self.down_proj]

    def extra_repr(self) -> str:
        return ", ".join(map(repr, self.weights))


PACKED = {Linear: PackedLinear, Experts: PackedExperts}


def _recipe(module: Linear | Experts, stage: str) -> Recipe:
    """The module's recipe, if its weights can be quantized once for all calls."""
    check_stage(stage)
    recipe = module.recipes[stage]
    if recipe.fprop.w is None or recipe.needs_rng:
        why = f"is random ({recipe.fprop.w})" if recipe.needs_rng else "leaves weights as they are"
        raise ValueError(f"the recipe of stage {stage} {why}; accepted: one that rounds weights to nearest")
    return recipe


def _rewritten(old: QTensor, new: QTensor) -> QTensor:
    """`new`, in the memory of `old`. Another object: what hangs on the old one was made from its codes."""
    fresh = new.tensors()
    for name, t in old.tensors().items():
        t.copy_(fresh[name])
    return replace(old)


def pack(model: nn.Module, stage: str = "rl_sampler") -> nn.Module:
    """A copy of the model, in eval mode and without gradients, whose converted layers are packed.

    Layers whose recipe quantizes no weights in that stage are copied as they are.

    Raises:
        ValueError: an unknown stage, a recipe that rounds at random.
    """
    check_stage(stage)
    # deepcopy takes what is in the memo for a copy that it has made already, so master weights are never copied.
    memo = {
        id(module): PACKED[type(module)](module, stage)
        for module in model.modules()
        if type(module) in PACKED and module.recipes[stage].fprop.w is not None
    }
    return copy.deepcopy(model, memo).eval().requires_grad_(False)


def packed_weights(model: nn.Module) -> list[QTensor]:
    """The matrices that a packed copy holds as codes."""
    return [w for m in model.modules() if isinstance(m, (PackedLinear, PackedExperts)) for w in m.weights]


@torch.no_grad()
def refit(packed: nn.Module, model: nn.Module) -> None:
    """Give a packed copy the present weights of its model, in place: nothing is allocated but one layer's codes.

    Raises:
        ValueError: a module of the copy that the model lacks.
    """
    modules = dict(model.named_modules())
    for name, module in packed.named_modules():
        if name not in modules:
            raise ValueError(f"the model has no {name!r}; accepted: the model that was packed")
        if isinstance(module, tuple(PACKED.values())):
            module.refit(modules[name])
            continue
        theirs = modules[name]._parameters | modules[name]._buffers
        for key, t in (module._parameters | module._buffers).items():
            if t is not None:
                t.copy_(theirs[key])
