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

from .. import formats
from ..qtensor import QTensor
from .errors import Refused

ONE = torch.ones(())
STOCK = 2688.0  # 6 · 448: what amax-storing layouts divide by
ROOMY = 1536.0  # 6 · 256: what rules with room above divide by (numerics, 2)
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

    def as_amax(self) -> tuple[Tensor, Tensor]:
        """(amax, denominator) whose quotient in fp32 is this scale, always.

        Denominator 2688 or 1536 where fp32 has an amax for it; else 2048, for which it has one for every multiplier;
        else the numbers as they are.
        """
        same = self.denominator.unique()
        if len(same) == 1 and same.item() in (STOCK, ROOMY):
            return self.numerator, same[0]
        m, exact = self.as_multiplier()
        for d in (STOCK, ROOMY, 2048.0) if exact else ():
            near = m * d
            for amax in (near, near.nextafter(torch.tensor(torch.inf)), near.nextafter(torch.zeros(()))):
                if bool((amax / d == m).all()) and bool(amax.isfinite().all()):
                    return amax, torch.tensor(d)
        return self.numerator, same[0] if len(same) == 1 else self.denominator


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
        """The rows of each matrix in another order."""
        return replace(self, q=replace(self.q, codes=take(self.q.codes, order), scales=take(self.q.scales, order)))

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
        raise Refused(f"{name}: codes have shape {tuple(codes.shape)}; accepted: [N, K] or [E, N, K], packed")
    k = codes.shape[-1] * format.codes_per_byte
    if k % format.block or tuple(scales.shape) != (*codes.shape[:-1], k // format.block):
        wanted = f"{(*codes.shape[:-1], k // format.block)}, K in whole blocks of {format.block}"
        raise Refused(
            f"{name}: codes {tuple(codes.shape)} with scales {tuple(scales.shape)}; accepted: scales {wanted}"
        )
    codes, scales = codes.view(format.codes_dtype), scales.view(format.scale_dtype)
    check_scales(name, format, scales)
    if format.element.bits == 8 and bool(codes.float().isnan().any()):
        raise Refused(f"{name}: an element is NaN; accepted: finite values")
    if outer is not None:
        outer = check_outer(name, outer, codes)
    shape = torch.Size((*codes.shape[:-1], k))
    scale = None if outer is None else spread(outer.value)
    return Stored(QTensor(codes, scales, scale, format, shape, dtype), outer, input_amax)


def check_scales(name: str, format: formats.Format, scales: Tensor) -> None:
    """Raises Refused where a block scale is NaN or negative."""
    data = scales.view(torch.uint8)
    bad = data == 0xFF if format.scale_dtype == torch.float8_e8m0fnu else data >= 0x7F
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        accepted = "0x00 to 0xFE" if format.scale_dtype == torch.float8_e8m0fnu else "0x00 to 0x7E"
        raise Refused(
            f"{name}: scale byte {data[where].item():#04x} at {where} is NaN or negative; accepted: {accepted}"
        )


def check_outer(name: str, outer: Outer, codes: Tensor) -> Outer:
    """The outer scale, one a matrix. Raises Refused for another number of them, or one that is no scale."""
    stack = codes.shape[:-2]
    parts = []
    for part, least in ((outer.numerator, 0.0), (outer.denominator, torch.finfo(torch.float32).tiny)):
        if part.dtype != torch.float32:
            raise Refused(f"{name}: outer scale is {part.dtype}; accepted: float32")
        if part.numel() not in (1, *stack) or part.dim() > 3:
            raise Refused(
                f"{name}: outer scale has shape {tuple(part.shape)}; accepted: one number, or one for each expert"
            )
        part = part.reshape(-1)
        good = part.isfinite() & (part >= least)
        if not bool(good.all()):
            raise Refused(f"{name}: outer scale has {part[~good][0].item()} in it; accepted: finite, positive")
        parts.append(part.reshape(()) if part.numel() == 1 else part)
    numerator, denominator = parts
    outer = Outer(numerator.expand(stack).contiguous(), denominator)
    if not bool(outer.value.isfinite().all()):
        raise Refused(f"{name}: the outer scale overflows fp32; accepted: a finite one")
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
