"""The scale of a block and the outer scale above it (docs/numerics.md, 2, 3, 5, 7).

Blocks come as fp32 [..., n] with n = 16 elements (a 1x16 block), 256 (a 16x16 tile, in the tensor's row-major order) or
32 (MX), all finite. Scales leave as uint8 codes [...], E4M3 or E8M0. Outer scales broadcast against [...].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..policy.formats import E2M1, E4M3, Element
from .elements import E2M1_VALUES, decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3
from .fp32 import FLT_MAX, at_most, bits, divide, f32, from_bits, sum_in_order

EDEN_VAL_MAX = E2M1.max / ((17 / 16) * 0.93)  # fp64; rounded once where it is used
ERRORS = {  # of candidates, from d = (x - decoded)·P: [..., n] -> [...]
    "mse": lambda d: sum_in_order(d * d),
    "mae": lambda d: sum_in_order(d.abs()),
    "absmax": lambda d: d.abs().amax(dim=-1),
}


@dataclass(frozen=True)
class Outer:
    """encode: S_enc, which brings values into the range of the block scales; decode: S_dec = global_scale. fp32."""

    encode: torch.Tensor
    decode: torch.Tensor


def outer_scales(a: torch.Tensor, scale: str, pow2: bool, eden: bool = False) -> Outer:
    """S_enc and S_dec of the amax `a` (fp32, any shape). Section 2; under eden rounding section 7."""
    if eden and scale == "amax":
        g = torch.where(a == 0, f32(1.0), divide(a, f32(255.99 * EDEN_VAL_MAX)))
        return Outer(encode=divide(1.0, g), decode=_power_of_two(g) if pow2 else g)
    c = E2M1.max * (E4M3.max if scale == "amax" else 256.0)
    encode = torch.where(a == 0, f32(1.0), at_most(divide(c, a), FLT_MAX))
    decode = divide(1.0, encode)
    if pow2:
        decode = _power_of_two(decode)
        encode = divide(1.0, decode)
    return Outer(encode, decode)


def _power_of_two(s: torch.Tensor) -> torch.Tensor:
    """s rounded up to a power of two, at least 2^-126."""
    b = bits(torch.maximum(s, f32(2.0**-126)))
    return from_bits(((b + 0x7FFFFF) >> 23) << 23)


def normalizer(s_dec: torch.Tensor) -> torch.Tensor:
    """P of section 2, the power of two that brings a normal S_dec into [1, 2): squares are summed after it is applied.

    2^(127−min(E, 253)), E being the exponent bits of S_dec: P itself is always a normal number.
    """
    exponent = (bits(s_dec) >> 23).clamp(max=253)
    return from_bits((254 - exponent) << 23)


def enc(scale_codes: torch.Tensor, s_dec: torch.Tensor) -> torch.Tensor:
    """The encode multiplier of a block: min(1 / fl(float(s)·S_dec), FLT_MAX). Section 2."""
    return at_most(divide(1.0, decode_e4m3(scale_codes) * s_dec), FLT_MAX)


def nvfp4_scales(x: torch.Tensor, outer: Outer, scale: str, rounding: str) -> torch.Tensor:
    """uint8 E4M3 codes [...] for blocks [..., n]. scale: a Spec's rule; rounding: a Spec's. Sections 2, 5, 7."""
    block_amax = x.abs().amax(dim=-1)
    if scale == "amax":
        if rounding in ("eden", "eden_block"):
            codes = _eden_amax(block_amax, outer)
        else:
            codes = _amax(block_amax, outer, "up" if rounding == "stochastic" else "nearest")
    else:
        b = divide(block_amax, E2M1.max) * outer.encode
        if scale == "sweep":
            codes = _least(x, outer, _sweep_candidates(b), _squared_error)
        elif scale == "minvar":
            codes = _least(x, outer, _minvar_candidates(b), _variance)
        else:
            error = {"four_over_six": "mse"}.get(scale, scale.removeprefix("four_over_six_"))
            codes = _least(x, outer, _four_over_six_candidates(b), lambda x, s, o: ERRORS[error](_difference(x, s, o)))
    return torch.where(block_amax == 0, 0, codes).to(torch.uint8)  # a zero block: byte 0 (section 4)


def _amax(block_amax, outer, rounding):
    m = outer.encode * f32(1 / 6)  # folded first; (a_b / 6)·S_enc differs in 2.3e-4 of the scales
    return encode_e4m3(at_most(block_amax * m, FLT_MAX), rounding)


def _eden_amax(block_amax, outer):
    return encode_e4m3(at_most(divide(block_amax, f32(EDEN_VAL_MAX) * outer.decode), E4M3.max))


def _four_over_six_candidates(b):
    return [encode_e4m3(at_most(b, E4M3.max)), encode_e4m3(at_most(b * f32(1.5), E4M3.max))]


def _sweep_candidates(b):
    c0 = encode_e4m3(at_most(b, E4M3.max)).to(torch.int64)
    return [(c0 + step).clamp(1, 126).to(torch.uint8) for step in (0, -1, 1, 4, 5)]


def _minvar_candidates(b):
    c0 = encode_e4m3(b, "up").to(torch.int64)
    return [(c0 + step).clamp(0, 126).to(torch.uint8) for step in range(6)]


def _least(x, outer, candidates, cost):
    """Codes of the candidate of least cost, the earlier on a tie (or where costs do not compare)."""
    best, least = candidates[0], cost(x, candidates[0], outer)
    for candidate in candidates[1:]:
        this = cost(x, candidate, outer)
        better = this < least
        best, least = torch.where(better, candidate, best), torch.where(better, this, least)
    return best


def _difference(x, codes, outer):
    """fl(fl(x·P) − fl(q·fl(fl(float(s)·S_dec)·P))), q nearest. [..., n]."""
    q = decode_e2m1(encode_e2m1(x * enc(codes, outer.decode)[..., None]))
    p = normalizer(outer.decode)
    return x * p[..., None] - q * (decode_e4m3(codes) * outer.decode * p)[..., None]


def _squared_error(x, codes, outer):
    return ERRORS["mse"](_difference(x, codes, outer))


def _variance(x, codes, outer):
    """fl(V·fl(s·s)), V = Σ fl((hi−y)·(y−lo)): the variance that stochastic rounding will have, in closed form."""
    y = at_most(x.abs() * enc(codes, outer.decode)[..., None], E2M1.max)
    values = torch.tensor(E2M1_VALUES)
    index = torch.searchsorted(values, y, right=True) - 1
    lo = values[index]  # the largest value <= y
    hi = torch.where(lo == y, y, values[(index + 1).clamp(max=len(values) - 1)])
    v = sum_in_order((hi - y) * (y - lo))
    s = decode_e4m3(codes)
    return v * (s * s)


def e8m0_scales(x: torch.Tensor, element: Element, scale: str) -> torch.Tensor:
    """uint8 E8M0 bytes [...] for finite blocks [..., 32]; scale "ceil" or "floor". Section 3."""
    block_amax = x.abs().amax(dim=-1)
    if scale == "ceil":
        b = bits(block_amax * f32(1 / element.max))
        e = (b >> 23) + ((b & 0x7FFFFF) != 0).to(torch.int64)
    else:
        e = (bits(block_amax) >> 23) - element.max_exponent
    low = -126 - int(math.log2(element.min))
    high = 127 - element.max_exponent
    e = e.clamp(127 + low, 127 + high)
    return torch.where(block_amax == 0, 0, e).to(torch.uint8)
