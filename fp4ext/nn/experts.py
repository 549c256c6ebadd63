"""The experts of a mixture: SwiGLU layers with stacked weights, whose GEMMs run on quantized operands.

    h = x·gate_up_proj[e]ᵀ,  y = (silu(gate)·up)·down_proj[e]ᵀ,  gate, up = the halves of h

for the rows e of x, which come sorted by expert. Each of the two products is a linear layer as in linear.py, its three
GEMMs grouped: one call for all experts, each expert with its own outer scales, as if it were a fp4ext.Linear alone.
Every GEMM here is fp4ext's, the plain ones too, so that an expert's rows never depend on how many others there are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..errors import Refused
from ..functional.grouped import check_offsets
from ..functional.quantization import check_input
from ..policy.policy import Policy
from ..policy.recipe import Recipe
from ..policy.stages import stage_of
from . import layer_ops
from .activation import swiglu
from .by_policy import ByPolicy
from .dense import recorded_linear


class StacksByPolicy(ByPolicy):
    """Experts with stacked weights, whose products follow the recipe of the current stage."""

    def product(self, x: Tensor, name: str, offsets: Tensor) -> Tensor:
        """x [T, K] times the stack of that name, by the stage's recipe: what an audit watches."""
        return grouped_linear(x, self.stack(name), offsets, self.recipes[stage_of(self)])

    def stack(self, name: str) -> Tensor:
        """A stack as [E, N, K]."""
        raise NotImplementedError

    @property
    def stacks(self) -> tuple[str, str]:
        """The names of the two stacks, in the order of their products."""
        raise NotImplementedError


class Experts(StacksByPolicy):
    """SwiGLU experts by a policy, in the layout of transformers' stacked experts. The parameters are plain.

    Args:
        experts, features, hidden: E, K and F: gate_up_proj [E, 2F, K] (gate first) and down_proj [E, K, F].
        device, dtype: of the parameters: fp32 (master weights), bf16, fp16.
        policy: a Policy or the name of one; default "end_to_end".
        name: the module's name, by which a policy may choose; convert fills it in.

    Input: x [T, K] in fp32, bf16 or fp16, rows sorted by expert, and offsets int32 [E], the ends of the experts' rows.
    Output [T, K] in the same dtype, or autocast's; rows past the last offset are zero, whatever x holds there.

    Raises:
        ValueError: fewer than one expert or column; an unknown policy.
    """

    def __init__(
        self,
        experts: int,
        features: int,
        hidden: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        policy: Policy | str = "end_to_end",
        name: str = "",
    ):
        super().__init__()
        for what, size in {"experts": experts, "features": features, "hidden": hidden}.items():
            if size < 1:
                raise Refused(f"{what} is {size}; accepted: a whole number from 1")
        shapes = (experts, 2 * hidden, features), (experts, features, hidden)
        gate_up, down = (nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for shape in shapes)
        self.gate_up_proj, self.down_proj = gate_up, down
        self.set_policy(policy, name)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert as nn.Linear would start."""
        for p in self.parameters():
            bound = 1 / math.sqrt(p.shape[-1])
            nn.init.uniform_(p, -bound, bound)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        h = swiglu(self.product(x, "gate_up_proj", offsets), stage_of(self))
        return self.product(h, "down_proj", offsets)

    def stack(self, name: str) -> Tensor:
        return self.gate_up_proj if name == "gate_up_proj" else self.down_proj

    @property
    def stacks(self) -> tuple[str, str]:
        return "gate_up_proj", "down_proj"

    def extra_repr(self) -> str:
        experts, features, hidden = self.down_proj.shape
        return f"{experts}, features={features}, hidden={hidden}, policy={self.policy.name}"


def grouped_linear(x: Tensor, w: Tensor, offsets: Tensor, recipe: Recipe) -> Tensor:
    """y[rows_e] = x[rows_e]·w[e]ᵀ by a recipe, with its backward. x [T, K], w [E, N, K], offsets int32 [E].

    Rows past the last offset are zero, in y and in the gradient of x.

    Raises:
        TypeError: a dtype that is not accepted.
        ValueError: shapes or devices that don't fit, a recipe that has no backward, or one that splits the mean.
        NotImplementedError: a second or a forward-mode derivative, a transform of torch.func.
    """
    if hasattr(w, "device_mesh"):
        w = _own_experts(w)
    _check(x, w, offsets, recipe)
    recorded = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    if recorded:
        recipe.check_backward()
    x = layer_ops.by_autocast(x)
    if recorded:
        return recorded_linear(x, w, None, offsets, recipe)
    return layer_ops.forward(x, w, None, offsets, recipe, False, False)[0]


def _own_experts(w: Tensor) -> Tensor:
    """This rank's experts of a DTensor that is cut between experts (fp4ext.distributed.ExpertParallel)."""
    from torch.distributed.tensor import DTensor

    assert isinstance(w, DTensor)
    if not all(p.is_shard(0) or p.is_replicate() for p in w.placements):
        raise Refused(f"the weight is placed as {w.placements}; accepted for experts: Shard(0), Replicate()")
    return w.to_local()


def _check(x: Tensor, w: Tensor, offsets: Tensor, recipe: Recipe) -> None:
    check_input("x", x)
    check_input("w", w)
    check_offsets(offsets, x)
    if x.device != w.device:
        raise Refused(f"x is on {x.device}; accepted: {w.device}, where the weight is")
    if w.dim() != 3 or x.dim() != 2 or x.shape[1] != w.shape[2]:
        raise Refused(f"x has shape {tuple(x.shape)} and w {tuple(w.shape)}; accepted: [T, K] and [E, N, K]")
    if offsets.shape[0] != w.shape[0]:
        raise Refused(f"w has {w.shape[0]} experts and offsets {offsets.shape[0]}; accepted: one end per expert")
    if recipe.mean_split:
        raise Refused("a recipe with mean_split is for linear layers; accepted for experts: mean_split=False")
