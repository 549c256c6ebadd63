"""The floating-point operations of each product, for torch.utils.flop_counter.FlopCounterMode.

A multiplication and its addition count as two operations, as for torch's own products. K counts in whole blocks, as the
operands store it. The unassigned rows of a mixture of experts count too. Attention counts every key of every query, as
torch's formula for scaled_dot_product_attention does, which does not halve it for a causal mask. Quantization counts as
zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ..policy import formats

Shape = tuple[int, ...]


def _stored(codes: Shape, format: str) -> int:
    """The elements that a row of codes holds."""
    return codes[-1] * (formats.get(format).codes_per_byte if format in formats.FORMATS else 1)


def _k(x_codes: Shape, x_format: str, w_codes: Shape, w_format: str) -> int:
    return min(_stored(x_codes, x_format), _stored(w_codes, w_format))


@register_flop_formula([torch.ops.fp4ext.gemm, torch.ops.fp4ext.gemm_add])
def gemm_flops(
    x_codes: Shape,
    x_scales: Shape | None,
    x_global: Shape | None,
    x_format: str,
    w_codes: Shape,
    w_scales: Shape | None,
    w_global: Shape | None,
    w_format: str,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """2·M·N·K. The arguments are those of the op, with a shape for each tensor."""
    return 2 * math.prod(x_codes[:-1]) * w_codes[0] * _k(x_codes, x_format, w_codes, w_format)


@register_flop_formula(torch.ops.fp4ext.grouped_gemm)
def grouped_gemm_flops(
    x_codes: Shape,
    x_scales: Shape | None,
    x_global: Shape | None,
    x_format: str,
    w_codes: Shape,
    w_scales: Shape | None,
    w_global: Shape | None,
    w_format: str,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """The products of all experts together: 2·T·N·K over rows, 2·M·N·T over tokens."""
    return 2 * x_codes[0] * w_codes[-2] * _k(x_codes, x_format, w_codes, w_format)


@register_flop_formula(torch.ops.fp4ext.attention)
def attention_flops(q: Shape, k: Shape, v: Shape, *rest: Any, **kwargs: Any) -> int:
    """2·B·H·M·T·D for the scores, and the same for the values."""
    batch, heads, m, d = q
    return 4 * batch * heads * m * k[2] * d
