"""Recipe: how the three GEMMs of a linear layer quantize their six operands. Data only.

    fprop:  y  = x · wᵀ          contraction over the K inputs
    dgrad:  dx = dy · w          contraction over the N outputs:  NT form  dy · (wᵀ)ᵀ
    wgrad:  dw = dyᵀ · x         contraction over the T tokens:   NT form  dyᵀ · (xᵀ)ᵀ

An operand's Spec is None where it stays as it is (BF16 under autocast). A GEMM whose operands are both None is plain.
A Format, its name or a key stands for the Spec that as_spec makes of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from ..errors import Refused
from .spec import Spec, as_spec


@dataclass(frozen=True)
class _Operands:
    def __post_init__(self):
        for name, value in list(vars(self).items()):
            if name != "from_fprop" and value is not None:
                object.__setattr__(self, name, as_spec(value))  # frozen


@dataclass(frozen=True)
class Fprop(_Operands):
    x: Spec | None = None
    w: Spec | None = None


@dataclass(frozen=True)
class Dgrad(_Operands):
    """`from_fprop`: quantize the dequantized forward operand ŵ instead of w.

    So dx is the gradient of the function that the forward really computed, and the forward copy is the only one saved.
    """

    dy: Spec | None = None
    w: Spec | None = None
    from_fprop: bool = False


@dataclass(frozen=True)
class Wgrad(_Operands):
    """`from_fprop`: quantize x̂ instead of x, likewise."""

    dy: Spec | None = None
    x: Spec | None = None
    from_fprop: bool = False


@dataclass(frozen=True)
class Recipe:
    """What each GEMM of a layer quantizes, and how.

    Where fprop is quantized and a backward GEMM is not, that GEMM runs in BF16 on the dequantized forward operand.

    `mean_split`: take the mean over tokens μ out of x before it is quantized, and multiply it in fp32:
    y = Q(x - 1μᵀ)·Q(w)ᵀ + 1·(w·μ)ᵀ. Activations with a large common component then spend their 4 bits on what differs.
    μ depends on the batch, so the sampler cannot have it.

    Raises:
        ValueError: a GEMM of which one operand alone has an RHT (or another one), which would not cancel.
    """

    fprop: Fprop = Fprop()
    dgrad: Dgrad = Dgrad()
    wgrad: Wgrad = Wgrad()
    mean_split: bool = False

    def __post_init__(self):
        for gemm, a, b in (
            ("fprop", self.fprop.x, self.fprop.w),
            ("dgrad", self.dgrad.dy, self.dgrad.w),
            ("wgrad", self.wgrad.dy, self.wgrad.x),
        ):
            rhts = [s.rht if s else "none" for s in (a, b)]
            if rhts[0] != rhts[1]:
                raise Refused(
                    f"{gemm}: both operands need the same rht, or it does not cancel; got {rhts[0]!r} and {rhts[1]!r}"
                )

    def row_variant(self) -> str | None:
        """Why a row of y depends on other rows of x; None: it does not."""
        x = self.fprop.x
        if self.mean_split:
            return "mean_split subtracts a mean over the batch"
        if x is None:
            return None
        if x.needs_rng:
            return f"x is rounded or rotated at random ({x})"
        if x.block == "16x16":
            return f"x has 16x16 blocks, which 16 rows share ({x})"
        if x.fmt.has_global_scale and x.outer != "row":
            return f"x has one outer scale for all rows ({x})"
        return None

    @property
    def key(self) -> str:
        """The recipe as one string, which crosses to the ops of layers; `parse` reads it."""
        return " ".join(_word(value) for gemm in (self.fprop, self.dgrad, self.wgrad) for value in vars(gemm).values())

    @classmethod
    @functools.cache
    def parse(cls, key: str) -> Recipe:
        """The recipe of a key, but for mean_split, which is no matter of the GEMMs."""
        words = iter(key.split())
        gemms = (kind(*(_value(next(words)) for _ in fields(kind))) for kind in (Fprop, Dgrad, Wgrad))
        return cls(*gemms)

    @property
    def quantizes(self) -> bool:
        """Whether anything is quantized at all."""
        return any((*_specs(self.fprop), *_specs(self.dgrad), *_specs(self.wgrad)))

    @property
    def needs_rng(self) -> bool:
        """Whether any operand is rounded or rotated at random."""
        return any(s.needs_rng for s in (*_specs(self.fprop), *_specs(self.dgrad), *_specs(self.wgrad)))

    def check_backward(self) -> None:
        """Raises ValueError where the backward would read rotated forward operands: nothing undoes that rotation."""
        rht = self.fprop.x.rht if self.fprop.x else "none"
        for gemm, spec, from_fprop in (
            ("dgrad", self.dgrad.w, self.dgrad.from_fprop),
            ("wgrad", self.wgrad.x, self.wgrad.from_fprop),
        ):
            if rht != "none" and (spec is None or from_fprop):
                raise Refused(
                    f"{gemm} reads the forward operand, which has rht={rht!r}; accepted: fprop without an rht, "
                    f"or a {gemm} that quantizes both operands itself, from_fprop=False"
                )

    @property
    def weight_bits(self) -> float:
        """Stored bits an element of the weight operand of fprop."""
        return self.fprop.w.fmt.bits_per_element if self.fprop.w else 16.0

    @property
    def saved_activation_bits(self) -> float:
        """Stored bits an element of the copy of x that is kept for wgrad."""
        spec = self.wgrad.x if self.wgrad.x and not self.wgrad.from_fprop else self.fprop.x
        return spec.fmt.bits_per_element if spec else 16.0


def _specs(gemm) -> list[Spec]:
    return [s for s in vars(gemm).values() if isinstance(s, Spec)]


def _word(value: Spec | bool | None) -> str:
    return value.key if isinstance(value, Spec) else str(value)


def _value(word: str) -> Spec | bool | None:
    plain = {"None": None, "True": True, "False": False}
    return plain[word] if word in plain else Spec.parse(word)
