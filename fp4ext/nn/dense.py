"""A linear layer whose three GEMMs run on quantized operands.

With x [T, K], w [N, K], dy [T, N], every GEMM is NT, contraction last on both operands, so the quantizer settles the
layout once:

    fprop   y [T, N]  = gemm(Q(x),        Q(w))          contraction K
    dgrad   dx [T, K] = gemm(Q(dy),       Q(w, axis=-2)) contraction N: w's columns
    wgrad   dw [N, K] = gemm(Q(dy, -2),   Q(x, axis=-2)) contraction T: the columns of dy and x

Only quantized copies are kept for the backward. Where the recipe's backward works `from_fprop`, that is the forward's
own row-wise copy: the backward dequantizes it, and rotates and rounds it again along the other axis, with signs drawn
afresh and shared by both operands, where they cancel. Elsewhere the column-wise copy is made beside the row-wise one.
Everything random comes from three RNG states per call, one per GEMM. The forward draws them from torch's generator,
without gradients too, so that a checkpoint that first runs without them repeats what it did. layer_ops.py has the two
ops, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import Refused
from ..functional.autograd import Context, first_derivative
from ..functional.quantization import check_input
from ..policy.policy import Policy
from ..policy.recipe import Recipe
from ..policy.stages import stage_of
from . import layer_ops
from .by_policy import ByPolicy
from .gathered import GatheredWeight


class Linear(nn.Linear, ByPolicy):
    """nn.Linear by a policy. Its parameters are plain: state_dict, optimizers and sharding see an ordinary nn.Linear.

    Args:
        in_features, out_features, bias, device, dtype: as nn.Linear. Weights may be fp32 (master weights), bf16, fp16.
        policy: a Policy or the name of one; default "end_to_end".
        name: the module's name, by which a policy may choose; convert fills it in.

    Input [.., in_features] in fp32, bf16 or fp16; output [.., out_features] in the same dtype, or autocast's.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        policy: Policy | str = "end_to_end",
        name: str = "",
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.set_policy(policy, name)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.recipes[stage_of(self)])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, policy={self.policy.name}"


def linear(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """x·wᵀ + bias by a recipe; torch.nn.functional.linear where nothing is quantized. Shapes as there; autocast holds.

    Raises:
        TypeError: a dtype that is not accepted.
        ValueError: shapes or devices that don't fit, a recipe that has no backward.
        NotImplementedError: a second or a forward-mode derivative, a transform of torch.func.
    """
    if isinstance(w, GatheredWeight):
        w.check(recipe.fprop.w)
    if not recipe.quantizes:
        return _plain(x, w, bias)
    if any(hasattr(t, "device_mesh") for t in (x, w, bias)):  # a DTensor; importing its class takes most of a second
        return _sharded(x, w, bias, recipe)
    return _whole(x, w, bias, recipe)


def _sharded(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """linear on DTensors: each rank's product of its shards."""
    from . import sharded

    if recipe.mean_split:
        raise Refused("a recipe with mean_split is for whole tensors; accepted for DTensors: mean_split=False")
    local_x, local_w, local_bias, place, groups, whole = sharded.operands(x, w, bias)
    return whole(_whole(local_x, local_w, local_bias, recipe, place, groups))


def _whole(
    x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, place: Sequence[int] = (), groups: str = ""
) -> Tensor:
    """linear on plain tensors, which may be shards of larger ones."""
    _check(x, w, bias)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, bias))
    if recorded:
        recipe.check_backward()
    x = layer_ops.by_autocast(x)
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    if recipe.mean_split and rows.shape[0]:
        rows, bias = _split_mean(rows, w, bias)
    if recorded:
        y = recorded_linear(rows, w, bias, None, recipe, place, groups)
    else:
        y = layer_ops.forward(rows, w, bias, None, recipe, False, False, place, groups)[0]
    # Not a view: FSDP2 hangs its hooks on a module's result, and an in-place operation on a view would lose them.
    if x.dim() == 2:
        return y
    whole: Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w.shape[0]))
    return whole


def _plain(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """torch's product, in the dtype of x where that differs from the weight's and autocast does not choose."""
    if x.dtype != w.dtype and layer_ops.by_autocast(x) is x:
        w, bias = w.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return nn.functional.linear(x, w, bias)


def _split_mean(rows: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x less its mean over tokens, and the bias that makes up for it, w·μ + bias in fp32."""
    mean = rows.mean(0, dtype=torch.float32)
    with torch.autocast(rows.device.type, enabled=False):
        shift = nn.functional.linear(mean, w.float(), None if bias is None else bias.float())
    return (rows - mean).to(rows.dtype), shift


def _check(x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    for name, t in {"x": x, "weight": w, "bias": bias}.items():
        if t is not None:
            check_input(name, t)
            if t.device != w.device:
                raise Refused(f"{name} is on {t.device}; accepted: {w.device}, where the weight is")
    if w.dim() != 2:
        raise Refused(f"weight has shape {tuple(w.shape)}; accepted: [N, K]")
    if x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise Refused(f"x has shape {tuple(x.shape)}; accepted: [.., {w.shape[1]}]")
    if bias is not None and bias.shape != w.shape[:1]:
        raise Refused(f"bias has shape {tuple(bias.shape)}; accepted: ({w.shape[0]},)")


def recorded_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    recipe: Recipe,
    place: Sequence[int] = (),
    groups: str = "",
) -> Tensor:
    """A layer whose backward is recorded; dense, or with offsets grouped, as experts.py calls it."""
    y: Tensor = _Recorded.apply(x, w, bias, offsets, recipe, place, groups)  # type: ignore[no-untyped-call]
    return y


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        offsets: Tensor | None,
        recipe: Recipe,
        place: Sequence[int],
        groups: str,
    ) -> Tensor:
        keep_w, keep_x = ctx.needs_input_grad[:2]  # dx reads w, and dw reads x
        y, states, *kept = layer_ops.forward(x, w, bias, offsets, recipe, keep_x, keep_w, place, groups)
        ctx.recipe, ctx.k, ctx.bias_dtype = recipe, x.shape[1], None if bias is None else bias.dtype
        ctx.shards, ctx.gathered = (place, groups), isinstance(w, GatheredWeight)
        ctx.dtypes, ctx.counts = (x.dtype, w.dtype), []
        saved = [] if offsets is None else [offsets]
        parts = zip((x, w), (keep_x, keep_w), layer_ops.keeps_plain(recipe), (kept[:3], kept[3:]), strict=True)
        for t, keep, plain, copy in parts:
            tensors = [] if not keep else [t] if plain else copy
            ctx.counts.append(len(tensors))
            saved += tensors
        ctx.save_for_backward(states, *saved)
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        states, *saved = ctx.saved_tensors
        of_x, of_w = ctx.counts
        offsets = saved.pop(0) if len(saved) > of_x + of_w else None
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        kept = saved[:of_x], saved[of_x:]
        dy = dy.contiguous()
        if ctx.gathered and need_dx:
            kept = kept[0], layer_ops.copy_for_dgrad(kept[1], ctx.recipe, dy.shape[1], ctx.k)
        dx, dw = layer_ops.backward(
            dy, states, *kept, offsets, ctx.recipe, ctx.k, ctx.dtypes, need_dx, need_dw, *ctx.shards
        )
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if need_db else None
        return dx, dw, db, None, None, None, None
