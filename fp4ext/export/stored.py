"""A weight as a checkpoint stores it: a QTensor, and the outer scale in the very numbers of the file.

    x̂ = element · block scale · (numerator / denominator)

Layouts write one outer scale in three ways: a multiplier m = m/1, a divisor g = 1/g, or amax/denominator. Two of them
say the same exactly when the fractions are equal, n·d' = n'·d, which fp64 decides without rounding (24 + 24 bits). A
power of two is the same in all three; so fp4ext's own checkpoints take powers of two by default ("pow2"), and every
reader, in whatever order it multiplies, decodes the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..functional.qtensor import QTensor
from ..policy import formats
from .errors import Invalid

ONE = torch.ones(())
# amax / outer scale, in layouts that store an amax: as it is, and for rules that leave room above (numerics, 2).
STOCK = formats.NVFP4.element.max * formats.E4M3.max
ROOMY = formats.NVFP4.element.max * 256
LARGE = 2.0**127
ULP = 2.0**-23  # of fp32, relative, at most
_MIN_E4M3 = 0x01


@dataclass(frozen=True, eq=False)
class Outer:
    """An NVFP4 outer scale, numerator / denominator, fp32 each: [] for a matrix, [E] for a stack of experts."""

    numerator: Tensor
    denominator: Tensor = ONE

    @property
    def value(self) -> Tensor:
        """The decode multiplier, rounded once to fp32."""
        return self.numerator / self.denominator

    def is_exactly(self, other: Outer) -> bool:
        """Whether both are the same real numbers."""
        a, b = (o.numerator.double() for o in (self, other))
        return bool((a * other.denominator.double() == b * self.denominator.double()).all())

    def as_multiplier(self) -> tuple[Tensor, bool]:
        """(m, whether it is exactly this scale)."""
        m = self.value
        return m, self.is_exactly(Outer(m))

    def as_divisor(self) -> tuple[Tensor, bool]:
        """(g, whether 1/g is exactly this scale). A scale of 0 has none: see Stored.without_zero_scales."""
        if bool((self.numerator == 1).all()):
            return self.denominator, True
        g = self.denominator / self.numerator
        return g, self.is_exactly(Outer(torch.ones_like(g), g))

    def as_amax(self) -> tuple[Tensor, Tensor, float]:
        """(amax, denominator, how far off their quotient is at most, relative, where a reader takes amax through BF16).

        Of these pairs the one that such a reader decodes best: the numbers as they are; 2688, 1536 and 2048 with the
        amax whose quotient in fp32 is this scale; for one scale, any denominator with an amax of 8 bits. Where none of
        them survives BF16, an amax of 8 bits over 2688 or 1536 whose quotient is an ulp off, if there is one: the
        scale of docs/numerics.md is fl(amax · fl(1/2688)), which is not always fl(amax/2688).
        """
        m, exact = self.as_multiplier()
        same = self.denominator.unique()
        own = (self.numerator, same[0] if len(same) == 1 else self.denominator)
        found: list[tuple[Tensor, Tensor]] = []
        if len(same) == 1 and (not exact or same.item() in (STOCK, ROOMY)):
            found.append(own)
        found += [pair for d in (STOCK, ROOMY, 2048.0) if (pair := _amax_over(m, torch.tensor(d))) is not None]
        found += [own]
        if len(m.unique()) == 1 and m.flatten()[0] > 0:
            over = torch.arange(128, 256) / 128 / m.flatten()[0]
            found += [pair for d in over if d.isfinite() and (pair := _amax_over(m, d)) is not None]
        if all(_off_in_bf16(a, d, m) > 0 for a, d in found):
            eights = [((m * d).bfloat16().float(), torch.tensor(d)) for d in (STOCK, ROOMY)]
            found += [(a, d) for a, d in eights if _off_in_bf16(a, d, m) <= ULP]
        amax, denominator = min(found, key=lambda pair: _off_in_bf16(pair[0], pair[1], m))
        return amax, denominator, _off_in_bf16(amax, denominator, m)


def _off_in_bf16(amax: Tensor, denominator: Tensor, m: Tensor) -> float:
    """How far amax, rounded to BF16, over the denominator is from m at most, relative."""
    off = (amax.bfloat16().float() / denominator - m).abs() / m.clamp(min=torch.finfo(torch.float32).tiny)
    return off.max().item() if off.numel() else 0.0


def _amax_over(m: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor] | None:
    """(amax, denominator) with fl(amax/denominator) = m, amax of 8 bits where one is; None where there is none."""
    near = m * denominator
    up, down = near.nextafter(torch.tensor(torch.inf)), near.nextafter(torch.zeros(()))
    amax = near
    for other in (down, up, near, near.bfloat16().float()):  # element by element, the last of them that gives m
        amax = torch.where(other / denominator == m, other, amax)
    return (amax, denominator) if bool(((amax / denominator == m) & amax.isfinite()).all()) else None


@dataclass(frozen=True, eq=False)
class Stored:
    """A quantized weight of a checkpoint.

    Attributes:
        q: [N, K], or a stack [E, N, K].
        outer: its outer scale as in the file, [] or [E]; None where the format has none.
        input_amax: the largest input that calibration saw, fp32 [], where the checkpoint says.
    """

    q: QTensor
    outer: Outer | None = None
    input_amax: Tensor | None = field(default=None)

    @classmethod
    def of(cls, q: QTensor, input_amax: Tensor | None = None) -> Stored:
        """A QTensor in memory, whose outer scale is a multiplier."""
        if q.global_scale is None:
            return cls(q, None, input_amax)
        n = q.global_scale
        if n.numel() == 1:
            n = n.reshape(()) if len(q.shape) == 2 else n.reshape(1).expand(q.shape[0])
        elif len(q.shape) == 3 and n.shape == (q.shape[0], 1, 1):
            n = n.reshape(-1)
        return cls(q, Outer(n.contiguous()), input_amax)

    @property
    def nvfp4_outer(self) -> Outer:
        """The outer scale of a weight of NVFP4, the format that has one."""
        assert self.outer is not None, f"{self.q.format} has no outer scale"
        return self.outer

    @property
    def per_matrix(self) -> bool:
        """Whether the outer scale is one a matrix, as every layout but fp4ext's own needs."""
        return self.outer is None or self.outer.numerator.dim() == len(self.q.shape) - 2

    def matrix(self, e: int, rows: slice = slice(None)) -> Stored:
        """Some rows of one expert of a stack, as a matrix."""
        codes, scales = self.q.codes[e, rows], self.q.scales[e, rows]
        outer = None
        if self.outer is not None:
            d = self.outer.denominator
            outer = Outer(self.outer.numerator[e], d[e] if d.dim() else d)
        shape = torch.Size((codes.shape[0], self.q.shape[-1]))
        q = replace(
            self.q, codes=codes, scales=scales, shape=shape, global_scale=None if outer is None else outer.value
        )
        return Stored(q, outer, self.input_amax)

    def rows(self, order: Tensor) -> Stored:
        """Some rows of each matrix, in that order."""
        shape = torch.Size((*self.q.shape[:-2], len(order), self.q.shape[-1]))
        codes, scales = take(self.q.codes, order), take(self.q.scales, order)
        return replace(self, q=replace(self.q, codes=codes, scales=scales, shape=shape))

    def without_zero_scales(self) -> Stored:
        """The same values with no scale that a reader could not divide by.

        A block of NVFP4 with scale byte 0 decodes to ±0: it gets the smallest scale and codes ±0. So does every block
        of an expert whose outer scale is 0; that becomes 1.
        """
        if self.q.format is not formats.NVFP4:
            return self
        q, outer = self.q, self.outer
        bytes_ = q.scales.view(torch.uint8)
        zero = bytes_ == 0
        if outer is not None and bool((outer.numerator == 0).any()):
            dead = outer.numerator == 0
            zero = zero | dead.reshape(*dead.shape, 1, 1)
            outer = Outer(torch.where(dead, ONE, outer.numerator), torch.where(dead, ONE, outer.denominator))
        if not bool(zero.any()):
            return self
        sign = torch.where(zero, 0x88, 0xFF).to(torch.uint8).repeat_interleave(q.format.block // 2, -1)
        scales = torch.where(zero, torch.tensor(_MIN_E4M3, dtype=torch.uint8), bytes_).view(q.scales.dtype)
        scale = q.global_scale if outer is None else spread(outer.value)
        return replace(self, q=replace(q, codes=q.codes & sign, scales=scales, global_scale=scale), outer=outer)


def stored(
    name: str,
    format: formats.Format,
    codes: Tensor,
    scales: Tensor,
    outer: Outer | None,
    dtype: torch.dtype,
    input_amax: Tensor | None = None,
) -> Stored:
    """A Stored of what a file holds, checked: shapes that fit, no NaN, no scale that has no meaning.

    Raises:
        Refused: with the name.
    """
    if codes.dim() not in (2, 3):
        raise Invalid(f"{name}: codes have shape {tuple(codes.shape)}; accepted: [N, K] or [E, N, K], packed")
    k = codes.shape[-1] * format.codes_per_byte
    if k % format.block or tuple(scales.shape) != (*codes.shape[:-1], k // format.block):
        wanted = f"{(*codes.shape[:-1], k // format.block)}, K in whole blocks of {format.block}"
        raise Invalid(
            f"{name}: codes {tuple(codes.shape)} with scales {tuple(scales.shape)}; accepted: scales {wanted}"
        )
    codes, scales = codes.view(format.codes_dtype), scales.view(format.scale_dtype)
    check_scales(name, format, scales)
    if outer is not None:
        outer = check_outer(name, outer, codes)
    shape = torch.Size((*codes.shape[:-1], k))
    scale = None if outer is None else spread(outer.value)
    q = QTensor(codes, scales, scale, format, shape, dtype)
    check_values(name, q)
    return Stored(q, outer, input_amax)


def check_values(name: str, q: QTensor) -> None:
    """Raises Refused where an element is NaN or infinite, or its scales take it past fp32."""
    if q.format.element.bits == 8 and not bool(q.codes.float().isfinite().all()):
        what = "NaN" if bool(q.codes.float().isnan().any()) else "infinite"
        raise Invalid(f"{name}: an element is {what}; accepted: finite values")
    if not q.shape.numel():
        return
    # The product of the maxima is a bound, and mostly small: then no value is computed.
    bound = q.format.element.max * q.scales.float().max().item()
    bound *= 1.0 if q.global_scale is None else q.global_scale.max().item()
    if bound >= LARGE and not bool(q.dequantize(torch.float32).bfloat16().isfinite().all()):
        raise Invalid(f"{name}: a value overflows, by its scales; accepted: finite weights")


def check_scales(name: str, format: formats.Format, scales: Tensor) -> None:
    """Raises Refused where a block scale is NaN or negative."""
    data = scales.view(torch.uint8)
    bad = data == 0xFF if format.scale_dtype == torch.float8_e8m0fnu else data >= 0x7F
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        accepted = "0x00 to 0xFE" if format.scale_dtype == torch.float8_e8m0fnu else "0x00 to 0x7E"
        raise Invalid(
            f"{name}: scale byte {data[where].item():#04x} at {where} is NaN or negative; accepted: {accepted}"
        )


def check_outer(name: str, outer: Outer, codes: Tensor) -> Outer:
    """The outer scale, one a matrix. Raises Refused for another number of them, or one that is no scale."""
    stack = codes.shape[:-2]
    parts = []
    for part, least in ((outer.numerator, 0.0), (outer.denominator, torch.finfo(torch.float32).tiny)):
        if part.dtype != torch.float32:
            raise Invalid(f"{name}: outer scale is {part.dtype}; accepted: float32")
        if part.numel() not in (1, *stack) or part.dim() > 3:
            raise Invalid(
                f"{name}: outer scale has shape {tuple(part.shape)}; accepted: one number, or one for each expert"
            )
        part = part.reshape(-1)
        good = part.isfinite() & (part >= least)
        if not bool(good.all()):
            raise Invalid(f"{name}: outer scale has {part[~good][0].item()} in it; accepted: finite, positive")
        parts.append(part.reshape(()) if part.numel() == 1 else part)
    numerator, denominator = parts
    outer = Outer(numerator.expand(stack).contiguous(), denominator)
    if not bool(outer.value.isfinite().all()):
        raise Invalid(f"{name}: the outer scale overflows fp32; accepted: a finite one")
    return outer


def spread(value: Tensor) -> Tensor:
    """An outer scale [] or [E] in the shape that a QTensor has it."""
    return value if value.dim() == 0 else value.reshape(-1, 1, 1)


def take(pieces: Tensor, order: Tensor) -> Tensor:
    """Rows of codes or scales in another order, as bytes: torch has few functions of 8-bit floats."""
    return pieces.view(torch.uint8)[..., order, :].view(pieces.dtype)


def interleave(rows: int) -> Tensor:
    """The order that turns rows g…, u… into g0, u0, g1, u1, …"""
    return torch.arange(rows).view(2, rows // 2).T.reshape(-1)


def separate(rows: int) -> Tensor:
    """The order that undoes interleave."""
    return torch.arange(rows).view(rows // 2, 2).T.reshape(-1)
