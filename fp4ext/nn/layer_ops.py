"""A layer's forward and its backward as ops of torch's library: what torch.compile sees of fp4ext.Linear and Experts.

    forward(x, w, bias, offsets, recipe)  → y, the RNG states it drew, and the quantized copies for the backward
    backward(dy, those)                   → dx, dw

Dense (x [T, K], w [N, K]) and grouped (x [T, K] cut by offsets [E], w [E, N, K]) layers differ in the functions that
quantize and multiply, not in what they do. One op holds a whole forward so that the states its products were rounded
with leave by the same op as its result: no compiler can drop, repeat or merge the draw (ops.py, "Random state").

A recipe crosses as its key. Quantized copies cross as three tensors of bytes: codes, block scales, outer scale; all
three are empty where the backward reads the plain tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from ..functional import fakes, ops
from ..functional.gemms import gemm
from ..functional.grouped import grouped_gemm, grouped_quantize
from ..functional.qtensor import QTensor, Ragged
from ..functional.quantization import quantize, wrap
from ..functional.transpose import transposed
from ..policy.recipe import Recipe
from ..policy.spec import Spec
from .gathered import GatheredWeight
from .shards import Shards

Operand = QTensor | Ragged | Tensor
Cut = Tensor | Shards | None  # what divides an operand: offsets between experts, or ranks that have shards of it
Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Shape = Sequence[int]
STATES = 1  # the place of the RNG states among the outputs of a forward


def forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    recipe: Recipe,
    keep_x: bool,
    keep_w: bool,
    place: Sequence[int] = (),
    groups: str = "",
) -> Forward:
    """Run the forward of a layer.

    Args:
        x: [T, K]. w: [N, K], or with offsets [E, N, K]. bias: [N] or None; None with offsets.
        offsets: int32 [E], the ends of the experts' rows; None: a dense layer.
        keep_x, keep_w: whether wgrad and dgrad will be wanted.
        place, groups: those of the Shards that x, w and dy are; empty: whole matrices. Dense layers only.

    Returns:
        y [T, N]; RNG states int64 [3, 2] of fprop, dgrad and wgrad (empty where nothing is random); codes, block scales
        and outer scale of what the backward keeps of x, then of w.
    """
    if isinstance(w, GatheredWeight) or _nobody_watches(x, w):
        states = _draw(x, place, groups) if recipe.needs_rng else _no_states(x)
        return _layer(x, w, bias, offsets, recipe, keep_x, keep_w, place, groups, states)
    op = torch.ops.fp4ext.layer_random if recipe.needs_rng else torch.ops.fp4ext.layer
    outputs: Forward = op(x, w, bias, offsets, recipe.key, keep_x, keep_w, place, groups)
    return outputs


def backward(
    dy: Tensor,
    states: Tensor,
    x: list[Tensor],
    w: list[Tensor],
    offsets: Tensor | None,
    recipe: Recipe,
    k: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    need_dx: bool,
    need_dw: bool,
    place: Sequence[int] = (),
    groups: str = "",
) -> tuple[Tensor | None, Tensor | None]:
    """dx [T, K] and dw, of the shape of w, in `dtypes`; None for what is not needed.

    x, w: the three tensors that `forward` gave for each, or the plain tensor alone where it keeps that.
    """
    arguments = dy, states, x, w, offsets
    if _nobody_watches(dy, states):
        dx, dw = _backward(*arguments, recipe, k, *dtypes, need_dx, need_dw, place, groups)
    else:
        dx, dw = torch.ops.fp4ext.layer_backward(*arguments, recipe.key, k, *dtypes, need_dx, need_dw, place, groups)
    return dx if need_dx else None, dw if need_dw else None


def _nobody_watches(*tensors: Tensor) -> bool:
    """Whether no compiler, mode (fake tensors, FLOP counters) or tensor subclass has to see an op. The function behind
    the op is then called itself: an op in Python costs about 0.1 ms per call, which a small layer would notice."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return all(type(t) in (Tensor, nn.Parameter) for t in tensors)


def by_autocast(x: Tensor) -> Tensor:
    """x in autocast's dtype where autocast is on for its device, else x itself."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def keeps_plain(recipe: Recipe) -> tuple[bool, bool]:
    """Whether the backward reads x and w as they are, instead of a quantized copy."""
    return _kept(recipe, "x")[0] is None, _kept(recipe, "w")[0] is None


def _kept(recipe: Recipe, role: str) -> tuple[Spec | None, int]:
    """How the backward's copy of x or w is quantized, and along which axis: the forward's own row-wise copy where the
    backward GEMM is plain or works from it, else a column-wise one."""
    row, col = (recipe.fprop.x, recipe.wgrad.x) if role == "x" else (recipe.fprop.w, recipe.dgrad.w)
    from_fprop = (recipe.wgrad if role == "x" else recipe.dgrad).from_fprop
    return (row, -1) if col is None or from_fprop else (col, -2)


def _layer(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    recipe: Recipe,
    keep_x: bool,
    keep_w: bool,
    place: Sequence[int],
    groups: str,
    states: Tensor,
) -> Forward:
    fprop, dgrad, wgrad = _streams(states)
    cut = Shards(place, groups) if groups else offsets
    xq, x_kept = _forward_operand(x, recipe.fprop.x, _kept(recipe, "x"), keep_x, "x", cut, fprop, wgrad)
    wq, w_kept = _forward_operand(w, recipe.fprop.w, _kept(recipe, "w"), keep_w, "w", cut, fprop, dgrad)
    y = product(xq, wq, bias, offsets, x.dtype, accumulate=recipe.accumulate)
    return y, states, *_parts(x_kept, x), *_parts(w_kept, w)


def _draw(x: Tensor, place: Sequence[int], groups: str) -> Tensor:
    """The RNG states of a layer; those of the shards of one layer are one rank's."""
    return ops.draw_states(x, 3, Shards(place, groups).draw_rank() if groups else None)


def _no_states(x: Tensor) -> Tensor:
    return x.new_empty((0, 2), dtype=torch.int64)


@torch.library.custom_op("fp4ext::layer", mutates_args=())
def _layer_op(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    recipe: str,
    keep_x: bool,
    keep_w: bool,
    place: Sequence[int],
    groups: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _layer(x, w, bias, offsets, Recipe.parse(recipe), keep_x, keep_w, place, groups, _no_states(x))


@ops.random_op("layer_random", states=STATES)
def _layer_random_op(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    recipe: str,
    keep_x: bool,
    keep_w: bool,
    place: Sequence[int],
    groups: str,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _layer(x, w, bias, offsets, Recipe.parse(recipe), keep_x, keep_w, place, groups, _draw(x, place, groups))


def _fake_layer(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    recipe: str,
    keep_x: bool,
    keep_w: bool,
    place: Sequence[int] = (),
    groups: str = "",
    after: Tensor | None = None,
) -> Forward:
    parsed = Recipe.parse(recipe)

    def kept(t: Tensor, role: str, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        spec, axis = _kept(parsed, role)
        if spec is None or not keep:
            return _parts(None, t)
        if offsets is None:
            return fakes.fake_quantized(t, spec.key, axis)
        return fakes.fake_grouped(t, offsets if role == "x" else None, spec.key, axis)

    states = x.new_empty((3 if parsed.needs_rng else 0, 2), dtype=torch.int64)
    return x.new_empty((x.shape[0], w.shape[-2])), states, *kept(x, "x", keep_x), *kept(w, "w", keep_w)


_layer_op.register_fake(_fake_layer)
_layer_random_op.register_fake(_fake_layer)


@torch.library.custom_op("fp4ext::layer_backward", mutates_args=())
def _layer_backward_op(
    dy: Tensor,
    states: Tensor,
    x: list[Tensor],
    w: list[Tensor],
    offsets: Tensor | None,
    recipe: str,
    k: int,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    need_dx: bool,
    need_dw: bool,
    place: Sequence[int],
    groups: str,
) -> tuple[Tensor, Tensor]:
    return _backward(
        dy, states, x, w, offsets, Recipe.parse(recipe), k, x_dtype, w_dtype, need_dx, need_dw, place, groups
    )


def _backward(
    dy: Tensor,
    states: Tensor,
    x: list[Tensor],
    w: list[Tensor],
    offsets: Tensor | None,
    r: Recipe,
    k: int,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    need_dx: bool,
    need_dw: bool,
    place: Sequence[int],
    groups: str,
) -> tuple[Tensor, Tensor]:
    _, rng_dgrad, rng_wgrad = _streams(states)
    (tokens, n), experts = dy.shape, [] if offsets is None else [offsets.shape[0]]
    cut = Shards(place, groups) if groups else offsets
    dx, dw = dy.new_empty(0, dtype=x_dtype), dy.new_empty(0, dtype=w_dtype)
    dy_row, dy_col = _both_ways(
        dy, r.dgrad.dy if need_dx else None, r.wgrad.dy if need_dw else None, "dy", cut, rng_dgrad, rng_wgrad
    )
    if need_dx:
        kept = _rebuilt(w, _kept(r, "w"), [*experts, n, k], None, x_dtype)
        wt = _backward_operand(kept, r.dgrad.w, r.dgrad.from_fprop, "w", cut, rng_dgrad, x_dtype)
        dx = _gradient(dy_row, wt, kept, offsets, x_dtype, r.accumulate)
    if need_dw:
        kept = _rebuilt(x, _kept(r, "x"), [tokens, k], offsets, x_dtype)
        xt = _backward_operand(kept, r.wgrad.x, r.wgrad.from_fprop, "x", cut, rng_wgrad, x_dtype)
        dw = _gradient(dy_col, xt, kept, offsets, torch.float32, r.accumulate).to(w_dtype)
    return dx, dw


@_layer_backward_op.register_fake
def _(
    dy: Tensor,
    states: Tensor,
    x: list[Tensor],
    w: list[Tensor],
    offsets: Tensor | None,
    recipe: str,
    k: int,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    need_dx: bool,
    need_dw: bool,
    place: Sequence[int] = (),
    groups: str = "",
) -> tuple[Tensor, Tensor]:
    w_shape = ([] if offsets is None else [offsets.shape[0]]) + [dy.shape[1], k]
    dx = dy.new_empty((dy.shape[0], k) if need_dx else (0,), dtype=x_dtype)
    return dx, dy.new_empty(w_shape if need_dw else (0,), dtype=w_dtype)


@register_flop_formula([torch.ops.fp4ext.layer, torch.ops.fp4ext.layer_random])
def _(x_shape: Shape, w_shape: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x_shape) * w_shape[-2]


@register_flop_formula(torch.ops.fp4ext.layer_backward)
def _(
    dy_shape: Shape,
    states: Any,
    x: Any,
    w: Any,
    offsets: Any,
    recipe: str,
    k: int,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    need_dx: bool,
    need_dw: bool,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * math.prod(dy_shape) * k * (need_dx + need_dw)


def _streams(states: Tensor) -> tuple[Tensor | None, ...]:
    """The RNG states of fprop, dgrad and wgrad."""
    return states.unbind() if states.shape[0] else (None, None, None)


def operand(t: Operand, spec: Spec | None, role: str, axis: int, cut: Cut, rng: Tensor | None) -> Operand:
    """t, or its transpose, quantized where there is a spec. Stacks of weights are not cut by offsets."""
    if spec is None:
        assert isinstance(t, Tensor)
        return t if axis == -1 else t.mT
    assert not isinstance(t, Ragged)
    if cut is None:
        return quantize(t, spec, axis=axis, rng=rng, role=role)
    if isinstance(cut, Shards):
        return cut.of(role).quantize(t, spec, axis, rng, role)
    return grouped_quantize(t, spec, None if role == "w" else cut, axis=axis, rng=rng, role=role)


def _both_ways(
    t: Tensor, row: Spec | None, col: Spec | None, role: str, cut: Cut, rng_row: Tensor | None, rng_col: Tensor | None
) -> tuple[Operand, Operand]:
    """t and its transpose, each quantized where it has a spec; in one op where both have and the layer is dense."""
    if row and col and cut is None:
        out = ops.quantize_rowcol(t, row.key, col.key, rng_row, rng_col, ops.ROLES[role])
        return wrap(t, row, -1, *out[:3]), wrap(t, col, -2, *out[3:])
    return operand(t, row, role, -1, cut, rng_row), operand(t, col, role, -2, cut, rng_col)


def _forward_operand(
    t: Tensor,
    row: Spec | None,
    kept: tuple[Spec | None, int],
    keep: bool,
    role: str,
    cut: Cut,
    rng_row: Tensor | None,
    rng_col: Tensor | None,
) -> tuple[Operand, Operand | None]:
    """(what fprop multiplies, what the backward keeps) of x or w."""
    spec, axis = kept
    if isinstance(t, GatheredWeight):
        return t.q, t.q if keep else None
    if keep and axis == -2:
        return _both_ways(t, row, spec, role, cut, rng_row, rng_col)
    q = operand(t, row, role, -1, cut, rng_row)
    return q, q if keep else None


def _backward_operand(
    kept: Operand, spec: Spec | None, from_fprop: bool, role: str, cut: Cut, rng: Tensor | None, dtype: torch.dtype
) -> Operand:
    """The transposed operand of a backward GEMM from what the forward kept; plain ones in `dtype`."""
    if spec is None:
        return (kept if isinstance(kept, Tensor) else kept.dequantize(dtype)).mT
    return operand(kept, spec, role, -2, cut, rng) if from_fprop else kept


def product(
    a: Operand,
    b: Operand,
    bias: Tensor | None,
    offsets: Tensor | None,
    dtype: torch.dtype,
    own: bool = False,
    accumulate: str = "invariant",
) -> Tensor:
    """a·bᵀ + bias, in `dtype`. A plain b (master weights, say) takes the dtype of a; two plain operands of a dense
    layer are torch's, unless it is to be fp4ext's `own` product."""
    if isinstance(b, Tensor):
        b = b.to(a.dtype)
    out = torch.float32 if dtype == torch.float16 else dtype
    if offsets is not None:
        return grouped_gemm(a, b, offsets, out, accumulate=accumulate).to(dtype)
    if isinstance(a, Tensor) and isinstance(b, Tensor) and not own:
        return F.linear(a, b, None if bias is None else bias.to(a.dtype)).to(dtype)
    assert not isinstance(a, Ragged) and not isinstance(b, Ragged)
    return gemm(a, b, bias, out, accumulate=accumulate).to(dtype)


def _gradient(
    a: Operand, b: Operand, kept: Operand, offsets: Tensor | None, dtype: torch.dtype, accumulate: str
) -> Tensor:
    """a·bᵀ of a backward, b made of what the forward kept. Where b is a dequantized operand and a plain, this is the
    BF16 backward of a 4-bit forward; on a CPU fp4ext's own product, for torch's is slow without BF16 instructions."""
    own = not isinstance(kept, Tensor) and a.device.type == "cpu"
    return product(a, b, None, offsets, dtype, own, accumulate)


def copy_for_dgrad(parts: list[Tensor], recipe: Recipe, n: int, k: int) -> list[Tensor]:
    """What dgrad reads of a gathered weight [n, k], of which the forward keeps the row-wise codes whatever the recipe:
    those, or where it wants a column-wise copy of 16×16 tiles their transpose."""
    if _kept(recipe, "w")[1] == -1:
        return parts
    row = _rebuilt(parts, (recipe.fprop.w, -1), [n, k], None, torch.float32)
    assert isinstance(row, QTensor)
    return list(_parts(transposed(row), row.codes))


def _parts(kept: Operand | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and block scales as bytes, and the outer scale, of a quantized copy; empty tensors where there is none."""
    if kept is None or isinstance(kept, Tensor):
        codes, scales = (like.new_empty(0, dtype=torch.uint8) for _ in range(2))
        return codes, scales, like.new_empty(0, dtype=torch.float32)
    outer = kept.global_scale
    outer = kept.codes.new_empty(0, dtype=torch.float32) if outer is None else outer
    return kept.codes.view(torch.uint8), kept.scales.view(torch.uint8), outer


def _rebuilt(
    parts: list[Tensor], kept: tuple[Spec | None, int], shape: list[int], offsets: Tensor | None, dtype: torch.dtype
) -> Operand:
    """The inverse of _parts: what the forward kept, of the logical `shape` before a transpose."""
    if len(parts) == 1:
        return parts[0]
    (spec, axis), (codes, scales, outer) = kept, parts
    assert spec is not None  # else the plain tensor is kept alone
    size = torch.Size(shape if axis == -1 else [*shape[:-2], shape[-1], shape[-2]])
    fmt = spec.fmt
    made = codes.view(fmt.codes_dtype), scales.view(fmt.scale_dtype), outer if fmt.has_global_scale else None
    if offsets is not None and axis == -2:
        return Ragged(*made, fmt, size, offsets, dtype)
    return QTensor(*made, fmt, size, dtype)
