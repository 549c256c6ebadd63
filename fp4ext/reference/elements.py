"""Elements: one value, one code (docs/numerics.md, 1; stochastic rounding: 5).

Encoders take fp32 (any shape) and give uint8 codes of the same shape; decoders the reverse. Stochastic encoders also
take 16 random bits an element: an int64 tensor in 0..65535, same shape. E2M1 codes lie in the low nibble until packed.
"""

from __future__ import annotations

import torch

from ..policy.formats import E4M3, E5M2
from .fp32 import bits, f32, from_bits

NAN = 0x7F  # of E4M3 and E5M2, before the sign
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest, ties to the even code, saturating at 6; the sign of zero is kept. Section 1.

    The index is the number of midpoints passed; a tie (equality) passes where the upper code is even.
    """
    a = _fp32(x).abs()
    passed = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
    index = sum(p.to(torch.uint8) for p in passed)
    return torch.signbit(x).to(torch.uint8) * 8 + index


def encode_e2m1_stochastic(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """One of the two neighbours, the upper with probability = fraction. Section 5.

    fp32 from 1 on: adding noise below the one mantissa bit kept carries into it, or into the exponent, which is the
    next code. Below 1 the codes 0, .5, 1 are evenly spaced: adding 1 first gives them the spacing of 1, 1.5, 2.
    """
    v = _fp32(x).abs()
    noise = (random.to(torch.int64) << 6) | 32
    from_one = ((bits(v) + noise) >> 22) - 252
    below_one = ((bits(v + f32(1.0)) + noise) >> 22) - 254
    index = torch.where(v >= 1.0, from_one, below_one).clamp(max=7)
    return (_sign(x) * 8 + index).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of codes 0..15 (uint8)."""
    index = codes.to(torch.int64)
    magnitude = torch.tensor(E2M1_VALUES)[index & 7]
    return torch.where(index >= 8, -magnitude, magnitude)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., 2n] codes 0..15 -> [..., n] bytes, element 2k in the low nibble. Section 1."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes -> [..., 2n] codes 0..15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


class _Float8:
    """A sign, exponent and mantissa format of 8 bits: E4M3 and E5M2 differ in these numbers only."""

    def __init__(self, mantissa: int, max_value: float, max_code: int):
        self.mantissa, self.max, self.max_code = mantissa, max_value, max_code
        self.min_normal_exponent = {3: -6, 2: -14}[mantissa]

    def nearest(self, x: torch.Tensor, round_magnitude=torch.round) -> torch.Tensor:
        """Codes of x; `round_magnitude` rounds |x| / step to an integer (torch.round: ties to even)."""
        a = x.abs().clamp(max=self.max)
        exponent = ((bits(a) >> 23) - 127).clamp(min=self.min_normal_exponent)
        step = from_bits((exponent - self.mantissa + 127) << 23)
        steps = round_magnitude(torch.true_divide(a, step)).to(torch.int64)  # by a power of two: exact
        # Codes count the steps of one exponent and go on into the next, so a carry needs no care.
        code = ((exponent - self.min_normal_exponent) << self.mantissa) + steps
        return self._with_sign(x, code)

    def stochastic(self, x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
        """One of the two neighbours: random bits on top of the dropped mantissa bits, half a bin below. Section 5."""
        v = x.abs()
        dropped = 23 - self.mantissa
        noise = (random.to(torch.int64) << (dropped - 16)) | (1 << (dropped - 17))
        min_normal = 2.0**self.min_normal_exponent
        first = (self.min_normal_exponent + 127) << self.mantissa  # (bits >> dropped) of the smallest normal
        normal = ((bits(v) + noise) >> dropped) - first + (1 << self.mantissa)
        subnormal = ((bits(v + f32(min_normal)) + noise) >> dropped) - first
        return self._with_sign(x, torch.where(v >= min_normal, normal, subnormal).clamp(max=self.max_code))

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return codes.contiguous().view(dtype).to(torch.float32)

    def _with_sign(self, x: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        code = torch.where(torch.isnan(x), NAN, code)
        return (_sign(x) * 128 + code).to(torch.uint8)


_E4M3 = _Float8(mantissa=3, max_value=E4M3.max, max_code=0x7E)
_E5M2 = _Float8(mantissa=2, max_value=E5M2.max, max_code=0x7B)


def encode_e4m3(x: torch.Tensor, rounding: str = "nearest") -> torch.Tensor:
    """Saturating at ±448; "nearest" (ties to even) or "up" (toward +inf: scales of SR). Sections 1, 5."""
    x = _fp32(x)
    if rounding == "nearest":
        return _E4M3.nearest(x)
    if rounding == "up":
        away, toward_zero = _E4M3.nearest(x, torch.ceil), _E4M3.nearest(x, torch.floor)
        return torch.where(_sign(x) == 1, toward_zero, away)
    raise ValueError(f"unknown rounding {rounding!r}; accepted: nearest, up")


def encode_e4m3_stochastic(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """E4M3 with 16 random bits an element. Section 5."""
    return _E4M3.stochastic(_fp32(x), random)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of E4M3 codes (uint8 or float8_e4m3fn)."""
    return _E4M3.decode(codes, torch.float8_e4m3fn)


def encode_e5m2(x: torch.Tensor) -> torch.Tensor:
    """Nearest, ties to even, saturating at ±57344 (infinities too). Section 1."""
    return _E5M2.nearest(_fp32(x))


def encode_e5m2_stochastic(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """E5M2 with 16 random bits an element. Section 5."""
    return _E5M2.stochastic(_fp32(x), random)


def decode_e5m2(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of E5M2 codes (uint8 or float8_e5m2)."""
    return _E5M2.decode(codes, torch.float8_e5m2)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """2^(byte-127) in fp32, from uint8 or float8_e8m0fnu: byte 0 is the subnormal 2^-127, byte 255 NaN. Section 1."""
    byte = codes.contiguous().view(torch.uint8).to(torch.int64)
    power = from_bits(torch.where(byte == 0, 1 << 22, byte << 23))
    return torch.where(byte == 255, torch.nan, power)


def _fp32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"got {x.dtype}; accepted: torch.float32, torch.bfloat16, torch.float16 (each exact in fp32)")
    return x.to(torch.float32)


def _sign(x: torch.Tensor) -> torch.Tensor:
    return torch.signbit(x).to(torch.int64)
