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

from .activation import swiglu
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
        self.weight = _renewed(self.weight, self._quantized(linear))
        if self.bias is not None:
            self.bias.copy_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return fprop(x, self.weight, self.bias, self.recipe)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

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
        spec = self.recipe.fprop.w
        return [grouped_quantize(w, spec, role="w") for w in (experts.gate_up_proj, experts.down_proj)]

    @torch.no_grad()
    def refit(self, experts: Experts) -> None:
        """Take over the experts' present weights, in place."""
        gate_up_proj, down_proj = self._quantized(experts)
        self.gate_up_proj, self.down_proj = (
            _renewed(self.gate_up_proj, gate_up_proj),
            _renewed(self.down_proj, down_proj),
        )

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        h = swiglu(grouped_fprop(x, self.gate_up_proj, offsets, self.recipe))
        return grouped_fprop(h, self.down_proj, offsets, self.recipe)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.gate_up_proj.nbytes + self.down_proj.nbytes

    def extra_repr(self) -> str:
        return f"{self.gate_up_proj!r}, {self.down_proj!r}"


PACKED = {Linear: PackedLinear, Experts: PackedExperts}


def _recipe(module: nn.Module, stage: str) -> Recipe:
    """The module's recipe, if its weights can be quantized once for all calls."""
    check_stage(stage)
    recipe = module.recipes[stage]
    spec = recipe.fprop.w
    if spec is None or recipe.needs_rng:
        why = "leaves weights as they are" if spec is None else f"is random ({spec})"
        raise ValueError(f"the recipe of stage {stage} {why}; accepted: one that rounds weights to nearest")
    return recipe


def _renewed(old: QTensor, new: QTensor) -> QTensor:
    """`new`, in the memory of `old`. A QTensor of its own: what hangs on the old one was made from the old codes."""
    for name, t in old.tensors().items():
        t.copy_(new.tensors()[name])
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
