"""The number formats: block lengths, largest values and dtypes.

An element format says which values one code can take. A block format adds a scale that consecutive elements along the
contraction axis share. NVFP4 adds an fp32 outer scale: x̂ = element · block scale · outer scale (docs/numerics.md,
sections 1-3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import Refused


@dataclass(frozen=True)
class Element:
    """A scalar format (docs/numerics.md, section 1).

    Attributes:
        bits: bits per element.
        max: the largest finite value; max_exponent: floor(log2 max).
        min: the smallest positive value.
        top_step: the distance between the two largest values.
    """

    name: str
    bits: int
    max: float
    max_exponent: int
    min: float
    top_step: float

    # A copy, or an unpickled element, is the object of that name, so that `is` compares elements.
    def __reduce__(self) -> tuple[Callable[[str], Element], tuple[str]]:
        return element, (self.name,)


E2M1 = Element("e2m1", 4, 6.0, 2, 0.5, 2.0)
E4M3 = Element("e4m3", 8, 448.0, 8, 2.0**-9, 32.0)
E5M2 = Element("e5m2", 8, 57344.0, 15, 2.0**-16, 8192.0)
ELEMENTS = {e.name: e for e in (E2M1, E4M3, E5M2)}


@dataclass(frozen=True)
class Format:
    """A block format: how a tensor is stored in few bits (docs/numerics.md, sections 2 and 3).

    Attributes:
        name: the string that users pass, e.g. "nvfp4".
        element: the Element that each code encodes.
        block: the number of elements along the contraction axis that share one scale.
        scale_dtype: torch dtype of the block scales.
        codes_dtype: torch dtype of the codes; a uint8 holds two E2M1 codes.
        has_global_scale: whether an fp32 outer scale multiplies the block scales.
        scale_rules, blocks, outers: the values that a Spec accepts; the first is the default.
    """

    name: str
    element: Element
    block: int
    scale_dtype: torch.dtype
    codes_dtype: torch.dtype
    has_global_scale: bool
    scale_rules: tuple[str, ...]
    blocks: tuple[str, ...]
    outers: tuple[str, ...]

    @property
    def codes_per_byte(self) -> int:
        return 8 // self.element.bits

    def padded(self, k: int) -> int:
        """k rounded up to whole blocks: the number of elements that the codes of a row of length k hold."""
        return -(-k // self.block) * self.block

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element, with the block scale and without the outer scale."""
        return self.element.bits + 8 / self.block

    def __str__(self) -> str:
        return self.name

    # A copy, or an unpickled format, is the object of that name, so that `is` compares formats.
    def __reduce__(self) -> tuple[Callable[[str | Format], Format], tuple[str]]:
        return get, (self.name,)


NVFP4 = Format(
    "nvfp4",
    E2M1,
    16,
    torch.float8_e4m3fn,
    torch.uint8,
    True,
    ("amax", "four_over_six", "four_over_six_mae", "four_over_six_absmax", "sweep", "minvar"),
    ("1x16", "16x16"),
    ("tensor", "pow2", "row", "row_pow2", "expert", "expert_pow2"),
)


def _mx(name: str, element: Element, codes_dtype: torch.dtype) -> Format:
    return Format(name, element, 32, torch.float8_e8m0fnu, codes_dtype, False, ("ceil", "floor"), ("1x32",), ("none",))


MXFP8 = _mx("mxfp8", E4M3, torch.float8_e4m3fn)
MXFP8_E5M2 = _mx("mxfp8_e5m2", E5M2, torch.float8_e5m2)
MXFP4 = _mx("mxfp4", E2M1, torch.uint8)

FORMATS = {f.name: f for f in (NVFP4, MXFP8, MXFP8_E5M2, MXFP4)}
BF16 = "bf16"  # what a recipe may say in place of a block format: the operand is not quantized


def get(name: str | Format) -> Format:
    """The Format of that name. Raises ValueError, which lists the names, for an unknown one."""
    if isinstance(name, Format):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise Refused(f"unknown format {name!r}; formats: {', '.join(FORMATS)}")
    return FORMATS[name]


def element(name: str) -> Element:
    """The Element of that name. Raises ValueError, which lists the names, for an unknown one."""
    if name not in ELEMENTS:
        raise Refused(f"unknown element {name!r}; elements: {', '.join(ELEMENTS)}")
    return ELEMENTS[name]
