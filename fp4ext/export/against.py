"""Quantize a matrix against scales that are already stored, so that what did not change keeps its bytes.

    ŵ = q · D,  D = fl(block scale · outer scale)      stored
    q' = q                              where ŵ rounds to w in w's dtype: the element is unchanged
    q' = encode(fl(w · min(1/D, FLT_MAX)))   elsewhere (numerics, 1 and 2)

A training step moves few weights by more than half a step of 4 bits: an export after it, or a weight sync, differs in
few bytes, and an unchanged model in none.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..policy import formats
from .errors import Invalid
from .stored import Stored, spread

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, formats.E2M1.max)
_MIDPOINTS = [(a + b) / 2 for a, b in zip(_E2M1[:-1], _E2M1[1:], strict=True)]  # a tie goes to the even code
_ROWS = 1 << 22  # elements at once


def against(x: Tensor, old: Stored) -> tuple[Stored, int]:
    """(x in the scales of `old`, how many elements no longer fit into them and were clipped).

    Args:
        x: [N, K] or [E, N, K], the shape of `old`; fp32, bf16 or fp16.

    Raises:
        Refused: another shape.
    """
    q = old.q
    if tuple(x.shape) != tuple(q.shape):
        raise Invalid(f"x has shape {tuple(x.shape)}; accepted: {tuple(q.shape)}, as what is stored")
    fmt, k = q.format, x.shape[-1]
    rows, codes = x.reshape(-1, k), q.codes.reshape(-1, q.codes.shape[-1])
    scales = q.scales.reshape(-1, q.scales.shape[-1])
    outer = torch.ones(1, 1) if old.outer is None else spread(old.outer.value).reshape(-1, 1)
    outer = outer.expand(-1, rows.shape[0] // max(1, outer.shape[0])).reshape(-1)
    parts, clipped, step = [], 0, max(1, _ROWS // max(1, k))
    for at in range(0, rows.shape[0], step):
        band = slice(at, at + step)
        scale = scales[band].float() * outer[band, None]
        was = _elements(codes[band], fmt).unflatten(-1, (-1, fmt.block))
        w = rows[band].float().unflatten(-1, (-1, fmt.block))
        same = (was * scale[..., None]).to(x.dtype) == rows[band].unflatten(-1, (-1, fmt.block))
        v = w * (1 / scale).clamp(max=torch.finfo(torch.float32).max)[..., None]
        clipped += int((~same & (v.abs() > fmt.element.max * (1 + 2**-10))).sum())
        fresh = _encode(v.flatten(-2), fmt)
        old_codes = _unpacked(codes[band], fmt)
        parts.append(_packed(torch.where(same.flatten(-2), old_codes, fresh), fmt))
    made = torch.cat(parts) if parts else codes
    return replace(old, q=replace(q, codes=made.view(q.codes.shape).view(fmt.codes_dtype), dtype=x.dtype)), clipped


def _unpacked(codes: Tensor, fmt: formats.Format) -> Tensor:
    """One code a byte."""
    data = codes.view(torch.uint8)
    return data if fmt.codes_per_byte == 1 else torch.stack((data & 0xF, data >> 4), -1).flatten(-2)


def _packed(codes: Tensor, fmt: formats.Format) -> Tensor:
    return codes if fmt.codes_per_byte == 1 else codes[..., 0::2] | codes[..., 1::2] << 4


def _elements(codes: Tensor, fmt: formats.Format) -> Tensor:
    """The values of codes, fp32."""
    if fmt.codes_per_byte == 1:
        return codes.view(fmt.codes_dtype).float()
    magnitudes = torch.tensor(_E2M1)
    return torch.cat((magnitudes, -magnitudes))[_unpacked(codes, fmt).long()]


def _encode(v: Tensor, fmt: formats.Format) -> Tensor:
    """The nearest codes, ties to even, saturating; one a byte."""
    if fmt.codes_per_byte == 1:
        return v.clamp(-fmt.element.max, fmt.element.max).to(fmt.codes_dtype).view(torch.uint8)
    a = v.abs()
    index = sum(((a > m) | ((a == m) & (i % 2 == 1))).to(torch.uint8) for i, m in enumerate(_MIDPOINTS))
    return index | (v.signbit().to(torch.uint8) << 3)
