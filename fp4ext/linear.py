"""A linear layer whose three GEMMs run on quantized operands.

With x [T, K], w [N, K], dy [T, N], every GEMM is NT, contraction last on both operands, so the quantizer settles the layout once:

    fprop   y [T, N]  = gemm(Q(x),        Q(w))          contraction K
    dgrad   dx [T, K] = gemm(Q(dy),       Q(w, axis=-2)) contraction N: w's columns
    wgrad   dw [N, K] = gemm(Q(dy, -2),   Q(x, axis=-2)) contraction T: the columns of dy and x

Only quantized copies are kept for the backward. Where the recipe's backward works `from_fprop`, that is the forward's own row-wise copy: the backward dequantizes it, and rotates and
rounds it again along the other axis, with signs drawn afresh and shared by both operands, where they cancel. Elsewhere the column-wise copy is made beside the row-wise one.
Everything random comes from two RNG states a call, one for dgrad and one for wgrad, drawn from torch's generator in the forward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import ops
from .gemm import gemm
from .policy import Policy, current_stage
from .qtensor import QTensor
from .quantize import quantize, wrap
from .recipe import Recipe
from .spec import Spec


class Linear(nn.Linear):
    """nn.Linear by a policy. Its parameters are plain: state_dict, optimizers and sharding see an ordinary nn.Linear.

    Args:
        in_features, out_features, bias, device, dtype: as nn.Linear. Weights may be fp32 (master weights), bf16 or fp16.
        policy: a Policy or the name of one; default "end_to_end".
        name: the module's name, by which a policy may choose; convert fills it in.

    Input [.., in_features] in fp32, bf16 or fp16; output [.., out_features] in the same dtype, or autocast's.
    """

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, *, policy="end_to_end", name=""):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.set_policy(policy, name)

    def set_policy(self, policy: Policy | str, name: str = "", step: int = 0) -> None:
        """Use another policy from now on."""
        from . import policies

        self.policy, self.policy_name = policies.get(policy), name
        self.recipes = self.policy.recipes(name, step)

    def set_step(self, step: int) -> None:
        """Tell the layer how far training is, for policies that change with it."""
        self.recipes = self.policy.recipes(self.policy_name, step)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.recipes[current_stage()])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, policy={self.policy.name}"


def linear(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """x·wᵀ + bias by a recipe: torch.nn.functional.linear where it quantizes nothing. Shapes as there; autocast is respected."""
    if not recipe.quantizes:
        return nn.functional.linear(x, w, bias)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rng = ops.draw_rng(x, 2) if recipe.needs_rng and torch.is_grad_enabled() else None
    return _Linear.apply(x, w, bias, recipe, rng)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, recipe: Recipe, rng):
        x2 = x.reshape(-1, x.shape[-1])
        rng_dgrad, rng_wgrad = (None, None) if rng is None else rng.unbind()
        keep_w, keep_x = ctx.needs_input_grad[:2]
        wgrad_x = recipe.wgrad.x if ctx.needs_input_grad[1] else None
        dgrad_w = recipe.dgrad.w if ctx.needs_input_grad[0] else None
        xq, x_saved = _forward_operand(x2, recipe.fprop.x, wgrad_x, recipe.wgrad.from_fprop, rng_wgrad, "x")
        wq, w_saved = _forward_operand(w, recipe.fprop.w, dgrad_w, recipe.dgrad.from_fprop, rng_dgrad, "w")
        y = _gemm(xq, wq, bias, x.dtype)

        ctx.recipe, ctx.shape, ctx.dtypes = recipe, x.shape, (x.dtype, w.dtype, None if bias is None else bias.dtype)
        ctx.unpack = []
        saved = [rng] if rng is not None else []
        for operand, kept in ((x_saved, keep_x), (w_saved, keep_w)):
            tensors, rebuild = _flatten(operand) if kept else ([], None)
            ctx.unpack.append(rebuild)
            saved += tensors
        ctx.save_for_backward(*saved)
        return y.reshape(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx, dy):
        recipe = ctx.recipe
        saved = list(ctx.saved_tensors)
        rng_dgrad, rng_wgrad = saved.pop(0).unbind() if recipe.needs_rng else (None, None)
        x, w = (rebuild(saved) if rebuild else None for rebuild in ctx.unpack)
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        dy = dy.reshape(-1, dy.shape[-1])
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dy_row, dy_col = _gradient_operands(
            dy, recipe.dgrad.dy if need_dx else None, recipe.wgrad.dy if need_dw else None, rng_dgrad, rng_wgrad
        )
        dx = dw = db = None
        if need_dx:
            wt = _backward_operand(w, recipe.dgrad.w, recipe.dgrad.from_fprop, rng_dgrad, "w")
            dx = _gemm(dy_row, wt, None, x_dtype).reshape(ctx.shape)
        if need_dw:
            xt = _backward_operand(x, recipe.wgrad.x, recipe.wgrad.from_fprop, rng_wgrad, "x")
            dw = _gemm(dy_col, xt, None, torch.float32).to(w_dtype)
        if need_db:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None


Operand = QTensor | Tensor


def _forward_operand(t: Tensor, row: Spec | None, col: Spec | None, from_fprop: bool, rng, role: str) -> tuple[Operand, Operand]:
    """(what fprop multiplies, what the backward keeps) of x or w."""
    if col is None or from_fprop:
        q = t if row is None else quantize(t, row, rng=rng, role=role)
        return q, q
    if row is None:
        return t, quantize(t, col, axis=-2, rng=rng, role=role)
    out = ops.quantize_rowcol(t, row.key, col.key, rng, rng, ops.ROLES[role])
    return wrap(t, row, -1, *out[:3]), wrap(t, col, -2, *out[3:])


def _backward_operand(kept: Operand, spec: Spec | None, from_fprop: bool, rng, role: str) -> Operand:
    """The transposed operand of a backward GEMM from what the forward kept."""
    if spec is None:
        return (kept.dequantize() if isinstance(kept, QTensor) else kept).mT
    if not from_fprop:
        return kept
    return quantize(kept.dequantize(torch.float32) if isinstance(kept, QTensor) else kept, spec, axis=-2, rng=rng, role=role)


def _gradient_operands(dy: Tensor, row: Spec | None, col: Spec | None, rng_row, rng_col) -> tuple[Operand, Operand]:
    """dy for dgrad and dyᵀ for wgrad, in one op where both are quantized."""
    if row and col:
        out = ops.quantize_rowcol(dy, row.key, col.key, rng_row, rng_col, ops.ROLES["dy"])
        return wrap(dy, row, -1, *out[:3]), wrap(dy, col, -2, *out[3:])
    return (
        quantize(dy, row, rng=rng_row, role="dy") if row else dy,
        quantize(dy, col, axis=-2, rng=rng_col, role="dy") if col else dy.mT,
    )


def _gemm(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a·bᵀ + bias, in `dtype`. Two plain operands are torch's: the BF16 GEMMs of a recipe."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        common = a.dtype if a.dtype == b.dtype else torch.promote_types(a.dtype, b.dtype)
        y = a.to(common) @ b.to(common).mT
        return (y if bias is None else y + bias).to(dtype)
    out = torch.float32 if dtype == torch.float16 else dtype
    return gemm(a, b, bias, out).to(dtype)


def _flatten(operand: Operand):
    """The tensors of an operand, and a function that takes them off the front of a list and rebuilds it."""
    if isinstance(operand, Tensor):
        return [operand], lambda saved: saved.pop(0)
    named = operand.tensors()
    rest = (operand.format, operand.shape, operand.dtype)

    def rebuild(saved: list[Tensor]) -> QTensor:
        fields = {name: saved.pop(0) for name in named}
        return QTensor(fields["codes"], fields["scales"], fields.get("global_scale"), *rest)

    return list(named.values()), rebuild
