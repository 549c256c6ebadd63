"""How many floating-point operations a product takes, for torch.utils.flop_counter.FlopCounterMode.

Two for each pair of elements that is multiplied and added, as torch counts its own products. K counts in whole blocks,
as the operands store it; rows of a mixture that are nobody's count; attention counts every key of every query, like
torch's own formula of scaled_dot_product_attention, which does not halve it for a causal mask. Quantizing counts
nothing.
"""

from __future__ import annotations

import math

import torch
from torch.utils.flop_counter import register_flop_formula

from ..policy import formats


def _stored(codes: tuple[int, ...], format: str) -> int:
    """The elements that a row of codes holds."""
    return codes[-1] * (formats.get(format).codes_per_byte if format in formats.FORMATS else 1)


def _k(x_codes, x_format: str, w_codes, w_format: str) -> int:
    return min(_stored(x_codes, x_format), _stored(w_codes, w_format))


@register_flop_formula([torch.ops.fp4ext.gemm, torch.ops.fp4ext.gemm_add])
def gemm_flops(x_codes, x_scales, x_global, x_format, w_codes, w_scales, w_global, w_format, *rest, **kwargs) -> int:
    """2·M·N·K; the arguments are the shapes of the op's."""
    return 2 * math.prod(x_codes[:-1]) * w_codes[0] * _k(x_codes, x_format, w_codes, w_format)


@register_flop_formula(torch.ops.fp4ext.grouped_gemm)
def grouped_gemm_flops(
    x_codes, x_scales, x_global, x_format, w_codes, w_scales, w_global, w_format, *rest, **kwargs
) -> int:
    """2·T·N·K over rows, 2·M·N·T over tokens: every expert's product together."""
    return 2 * x_codes[0] * w_codes[-2] * _k(x_codes, x_format, w_codes, w_format)


@register_flop_formula(torch.ops.fp4ext.attention)
def attention_flops(q, k, v, *rest, **kwargs) -> int:
    """2·B·H·M·T·D for the scores and as many for the values."""
    batch, heads, m, d = q
    return 4 * batch * heads * m * k[2] * d
