"""Spec: how one operand is quantized. Data only; it crosses to C++ as one canonical string, Spec.key.

A combination that the numerics contract (docs/numerics.md) calls biased or undefined is refused here; the message says
what is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import Refused
from . import formats
from .formats import Format

ROUNDINGS = ("nearest", "stochastic", "eden", "eden_block")
RHTS = ("none", "16", "32", "64", "128", "16x2", "32x2", "64x2", "128x2")
UNBIASED_SCALES = ("amax", "minvar", "ceil")  # the rules whose scales never clip, which stochastic rounding needs
EDEN_SCALES = {"eden": ("amax", "sweep"), "eden_block": ("amax",)}  # by rounding


@dataclass(frozen=True)
class Spec:
    """How one operand is quantized.

    Args:
        format: "nvfp4", "mxfp8", "mxfp8_e5m2" or "mxfp4".
        scale: the block scale's rule; default "amax" (NVFP4) or "ceil" (MX). docs/numerics.md, sections 2 and 3.
        rounding: "nearest", "stochastic" (unbiased; needs scale "amax", "minvar" or "ceil"; section 5), or "eden"
            (unbiased; needs an RHT; scales are corrected per rotated vector; section 7) or "eden_block" (the same per
            block, as published; scale "amax").
        block: "1x16" or "16x16" (NVFP4), "1x32" (MX).
        outer: which elements share an fp32 outer scale: those of a "tensor", a "row" or an "expert" (NVFP4), or "none"
            (MX). "pow2", "row_pow2" and "expert_pow2" are the same three with scales rounded up to powers of two.
        rht: random Hadamard transform along the contraction: "none", "16" … "128" (also as int), or in two stages,
            "16x2" … "128x2" (section 6).

    Raises:
        ValueError: an unknown value, or a combination that is undefined or biased.
    """

    format: str = "nvfp4"
    scale: str | None = None
    rounding: str = "nearest"
    block: str | None = None
    outer: str | None = None
    rht: str | int | None = None

    def __post_init__(self) -> None:
        f = formats.get(self.format)
        put: Callable[[str, object], None] = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("format", f.name)
        put("scale", f.scale_rules[0] if self.scale is None else self.scale)
        put("block", f.blocks[0] if self.block is None else self.block)
        put("outer", f.outers[0] if self.outer is None else self.outer)
        put("rht", "none" if self.rht is None else str(self.rht))
        _one_of(f"scale rule for {f}", self.scale, f.scale_rules)
        _one_of("rounding", self.rounding, ROUNDINGS)
        _one_of(f"block for {f}", self.block, f.blocks)
        _one_of(f"outer scale for {f}", self.outer, f.outers)
        _one_of("rht", self.rht, RHTS)
        if self.rounding == "stochastic":
            unbiased = tuple(s for s in f.scale_rules if s in UNBIASED_SCALES)
            what = f"scale rule for {f} with stochastic rounding (others clip or select by error: biased)"
            _one_of(what, self.scale, unbiased)
        if self.is_eden:
            _one_of(f"format with {self.rounding} rounding", self.format, ("nvfp4",))
            _one_of(f"scale rule with {self.rounding} rounding", self.scale, EDEN_SCALES[self.rounding])
            if self.rht == "none":
                raise Refused(f"{self.rounding} rounding needs an rht, got 'none'; accepted: {', '.join(RHTS[1:])}")
        if self.block == "16x16" and (self.is_eden or self.rht != "none"):
            raise Refused(
                f"16x16 blocks take neither eden rounding nor an rht, got rounding={self.rounding!r}, "
                f"rht={self.rht!r}; accepted: rounding nearest or stochastic, rht none"
            )
        if self.block == "16x16" and self.group == "row":
            accepted = ", ".join(outer for outer in f.outers if not outer.startswith("row"))
            raise Refused(
                f"a 16x16 tile has one scale for 16 rows, so outer={self.outer!r} is undefined; accepted: {accepted}"
            )

    @property
    def key(self) -> str:
        """The canonical string, e.g. "nvfp4/amax/nearest/1x16/tensor/none". csrc/ops/parse.h reads it."""
        return "/".join(getattr(self, field.name) for field in fields(self))

    @classmethod
    def parse(cls, key: str) -> Spec:
        """The Spec of a key; trailing parts may be left out ("mxfp8", "nvfp4/sweep")."""
        parts = key.split("/")
        if len(parts) > len(fields(cls)):
            names = "/".join(field.name for field in fields(cls))
            raise Refused(f"spec {key!r} has {len(parts)} parts; accepted: {names}, or the first few of them")
        return cls(*parts)

    def with_(self, **changes: Any) -> Spec:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @property
    def group(self) -> str:
        """The elements that share an outer scale: "tensor", "row" or "expert"; "none" for MX."""
        return "tensor" if self.outer == "pow2" else str(self.outer).removesuffix("_pow2")

    @property
    def pow2(self) -> bool:
        """Whether outer scales are rounded up to powers of two."""
        return str(self.outer).endswith("pow2")

    def of_one_expert(self) -> Spec:
        """The Spec that quantizes the matrix of one expert alone as this one does in a stack."""
        return self.with_(outer="pow2" if self.pow2 else "tensor") if self.group == "expert" else self

    @property
    def fmt(self) -> Format:
        """The Format named by `format`."""
        return formats.get(self.format)

    @property
    def is_eden(self) -> bool:
        """Whether MS-EDEN corrects the block scales, whatever shares a correction."""
        return self.rounding in EDEN_SCALES

    @property
    def needs_rng(self) -> bool:
        """Whether values are rounded or rotated at random."""
        return self.rounding != "nearest" or self.rht != "none"

    def __str__(self) -> str:
        return self.key


def as_spec(spec: Spec | Format | str) -> Spec:
    """The Spec that is meant by a Spec, by a Format, by the name of one, or by a key such as "nvfp4/sweep".

    Every public function that takes a spec reads it by this one, so that all take the same spellings.

    Raises:
        Refused: no format of that name, or what Spec refuses.
    """
    if isinstance(spec, Spec):
        return spec
    return Spec.parse(spec) if isinstance(spec, str) else Spec(spec.name)


def _one_of(what: str, value: object, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise Refused(f"unknown {what}: {value!r}; accepted: {', '.join(accepted)}")
