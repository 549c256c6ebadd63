"""A linear layer whose three GEMMs run on quantized operands.

With x [T, K], w [N, K], dy [T, N], every GEMM is NT, contraction last on both operands, so the quantizer settles the
layout once:

    fprop   y [T, N]  = gemm(Q(x),        Q(w))          contraction K
    dgrad   dx [T, K] = gemm(Q(dy),       Q(w, axis=-2)) contraction N: w's columns
    wgrad   dw [N, K] = gemm(Q(dy, -2),   Q(x, axis=-2)) contraction T: the columns of dy and x

Only quantized copies are kept for the backward. Where the recipe's backward works `from_fprop`, that is the forward's
own row-wise copy: the backward dequantizes it, and rotates and rounds it again along the other axis, with signs drawn
afresh and shared by both operands, where they cancel. Elsewhere the column-wise copy is made beside the row-wise one.
Everything random comes from three RNG states a call, one a GEMM, drawn from torch's generator in the forward. They are
drawn without gradients too, so that a checkpoint that first runs without them repeats what it did.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import ops, policies
from .gemm import gemm
from .policy import Policy, current_stage
from .qtensor import QTensor
from .quantize import check_input, quantize, wrap
from .recipe import Recipe
from .spec import Spec


class Linear(nn.Linear):
    """nn.Linear by a policy. Its parameters are plain: state_dict, optimizers and sharding see an ordinary nn.Linear.

    Args:
        in_features, out_features, bias, device, dtype: as nn.Linear. Weights may be fp32 (master weights), bf16, fp16.
        policy: a Policy or the name of one; default "end_to_end".
        name: the module's name, by which a policy may choose; convert fills it in.

    Input [.., in_features] in fp32, bf16 or fp16; output [.., out_features] in the same dtype, or autocast's.
    """

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, *, policy="end_to_end", name=""):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.set_policy(policy, name)

    def set_policy(self, policy: Policy | str, name: str = "", step: int = 0) -> None:
        """Use another policy from now on."""
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
    """x·wᵀ + bias by a recipe; torch.nn.functional.linear where nothing is quantized. Shapes as there; autocast holds.

    Raises:
        TypeError: a dtype that is not accepted.
        ValueError: shapes or devices that don't fit, a recipe that has no backward.
    """
    if not recipe.quantizes:
        return nn.functional.linear(x, w, bias)
    _check(x, w, bias)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, bias))
    if recorded:
        recipe.check_backward()
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rng = ops.draw_rng(x, 3) if recipe.needs_rng else None
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    if recipe.mean_split and rows.shape[0]:
        rows, bias = _split_mean(rows, w, bias)
    if recorded:
        y = _Linear.apply(rows, w, bias, recipe, rng)
    else:
        rng_fprop = _streams(rng)[0]
        xq, wq = _quantize(rows, recipe.fprop.x, "x", -1, rng_fprop), _quantize(w, recipe.fprop.w, "w", -1, rng_fprop)
        y = _gemm(xq, wq, bias, x.dtype)
    return y.view(*x.shape[:-1], w.shape[0])


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
                raise ValueError(f"{name} is on {t.device}; accepted: {w.device}, where the weight is")
    if w.dim() != 2:
        raise ValueError(f"weight has shape {tuple(w.shape)}; accepted: [N, K]")
    if x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}; accepted: [.., {w.shape[1]}]")
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; accepted: ({w.shape[0]},)")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, recipe: Recipe, rng):
        rng_fprop, rng_dgrad, rng_wgrad = _streams(rng)
        keep_w, keep_x = ctx.needs_input_grad[:2]
        wgrad_x = recipe.wgrad.x if keep_x else None
        dgrad_w = recipe.dgrad.w if keep_w else None
        xq, x_saved = _forward_operand(x, recipe.fprop.x, wgrad_x, recipe.wgrad.from_fprop, rng_fprop, rng_wgrad, "x")
        wq, w_saved = _forward_operand(w, recipe.fprop.w, dgrad_w, recipe.dgrad.from_fprop, rng_fprop, rng_dgrad, "w")
        y = _gemm(xq, wq, bias, x.dtype)

        ctx.recipe, ctx.dtypes = recipe, (x.dtype, w.dtype, None if bias is None else bias.dtype)
        ctx.unpack = []
        saved = [rng] if rng is not None else []
        for operand, kept in ((x_saved, keep_x), (w_saved, keep_w)):
            tensors, rebuild = _flatten(operand) if kept else ([], None)
            ctx.unpack.append(rebuild)
            saved += tensors
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        recipe, dy = ctx.recipe, dy.contiguous()
        saved = list(ctx.saved_tensors)
        _, rng_dgrad, rng_wgrad = _streams(saved.pop(0) if recipe.needs_rng else None)
        x, w = (rebuild(saved) if rebuild else None for rebuild in ctx.unpack)
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dy_row, dy_col = _gradient_operands(
            dy, recipe.dgrad.dy if need_dx else None, recipe.wgrad.dy if need_dw else None, rng_dgrad, rng_wgrad
        )
        dx = dw = db = None
        if need_dx:
            wt = _backward_operand(w, recipe.dgrad.w, recipe.dgrad.from_fprop, rng_dgrad, "w", x_dtype)
            dx = _gradient(dy_row, wt, w, x_dtype)
        if need_dw:
            xt = _backward_operand(x, recipe.wgrad.x, recipe.wgrad.from_fprop, rng_wgrad, "x", x_dtype)
            dw = _gradient(dy_col, xt, x, torch.float32).to(w_dtype)
        if need_db:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None


Operand = QTensor | Tensor


def _quantize(t: Operand, spec: Spec | None, role: str, axis: int = -1, rng: Tensor | None = None) -> Operand:
    """t, or its transpose, quantized where there is a spec."""
    if spec is None:
        return t if axis == -1 else t.mT
    return quantize(t, spec, axis=axis, rng=rng, role=role)


def _streams(rng: Tensor | None) -> tuple[Tensor | None, ...]:
    """The RNG states of fprop, dgrad and wgrad."""
    return (None, None, None) if rng is None else rng.unbind()


def _forward_operand(
    t: Tensor, row: Spec | None, col: Spec | None, from_fprop: bool, rng_row, rng_col, role: str
) -> tuple[Operand, Operand]:
    """(what fprop multiplies, what the backward keeps) of x or w."""
    if col is None or from_fprop:
        q = _quantize(t, row, role, -1, rng_row)
        return q, q
    if row is None:
        return t, _quantize(t, col, role, -2, rng_col)
    out = ops.quantize_rowcol(t, row.key, col.key, rng_row, rng_col, ops.ROLES[role])
    return wrap(t, row, -1, *out[:3]), wrap(t, col, -2, *out[3:])


def _backward_operand(
    kept: Operand, spec: Spec | None, from_fprop: bool, rng, role: str, dtype: torch.dtype
) -> Operand:
    """The transposed operand of a backward GEMM from what the forward kept; plain ones in `dtype`."""
    if spec is None:
        return (kept.dequantize(dtype) if isinstance(kept, QTensor) else kept).mT
    if not from_fprop:
        return kept
    return _quantize(kept, spec, role, -2, rng)


def _gradient_operands(dy: Tensor, row: Spec | None, col: Spec | None, rng_row, rng_col) -> tuple[Operand, Operand]:
    """dy for dgrad and dyᵀ for wgrad, in one op where both are quantized."""
    if row and col:
        out = ops.quantize_rowcol(dy, row.key, col.key, rng_row, rng_col, ops.ROLES["dy"])
        return wrap(dy, row, -1, *out[:3]), wrap(dy, col, -2, *out[3:])
    return _quantize(dy, row, "dy", -1, rng_row), _quantize(dy, col, "dy", -2, rng_col)


def _gemm(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a·bᵀ + bias, in `dtype`. A plain b (master weights, say) takes the dtype of a; two plain operands are torch's."""
    if isinstance(b, Tensor):
        b = b.to(a.dtype)
        if isinstance(a, Tensor):
            return nn.functional.linear(a, b, None if bias is None else bias.to(a.dtype)).to(dtype)
    out = torch.float32 if dtype == torch.float16 else dtype
    return gemm(a, b, bias, out).to(dtype)


def _gradient(a: Operand, b: Operand, kept: Operand, dtype: torch.dtype) -> Tensor:
    """a·bᵀ of a backward, b made of what the forward kept. Where b is a dequantized operand and a plain, this is the
    BF16 backward of a 4-bit forward; on a CPU fp4ext's own product, for torch's is slow without BF16 instructions."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and isinstance(kept, QTensor) and a.device.type == "cpu":
        out = torch.float32 if dtype == torch.float16 else dtype
        return gemm(a, b.to(a.dtype), None, out).to(dtype)
    return _gemm(a, b, None, dtype)


def _flatten(operand: Operand):
    """The tensors of an operand, and a function that takes them off the front of a list and rebuilds it."""
    if isinstance(operand, Tensor):
        return [operand], lambda saved: saved.pop(0)
    kind, named = type(operand), operand.tensors()
    rest = {name: value for name, value in vars(operand).items() if name not in named}

    def rebuild(saved: list[Tensor]):
        return kind(**{name: saved.pop(0) for name in named}, **rest)

    return list(named.values()), rebuild
