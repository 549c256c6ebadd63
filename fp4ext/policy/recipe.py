"""Recipe: how each of the six operands of a linear layer's three GEMMs is quantized. Data only.

    fprop:  y  = x · wᵀ          contraction over the K inputs
    dgrad:  dx = dy · w          contraction over the N outputs:  NT form  dy · (wᵀ)ᵀ
    wgrad:  dw = dyᵀ · x         contraction over the T tokens:   NT form  dyᵀ · (xᵀ)ᵀ

An operand whose Spec is None is not quantized (it is BF16 under autocast). A GEMM whose operands both have None is
plain. A Format, its name or a key stands for the Spec that as_spec makes of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

from ..errors import Refused
from .spec import Spec, as_spec

ACCUMULATE = ("invariant", "fast")


def short_repr(self: Any) -> str:
    """The repr of a dataclass without the fields that have their defaults: a default of a signature stays short."""
    changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


@dataclass(frozen=True)
class _Operands:
    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if name != "from_fprop" and value is not None:
                object.__setattr__(self, name, as_spec(value))  # frozen


@dataclass(frozen=True)
class Fprop(_Operands):
    """The forward GEMM, y = x·wᵀ: how x and w are quantized."""

    x: Spec | None = None
    w: Spec | None = None
    __repr__ = short_repr


@dataclass(frozen=True)
class Dgrad(_Operands):
    """The GEMM of the input's gradient, dx = dy·w: how dy and w are quantized.

    `from_fprop`: quantize ŵ, the dequantized operand of the forward, instead of w. dx is then the gradient of the
    function that the forward computed, and the forward's copy of w is the only one saved.
    """

    dy: Spec | None = None
    w: Spec | None = None
    from_fprop: bool = False
    __repr__ = short_repr


@dataclass(frozen=True)
class Wgrad(_Operands):
    """The GEMM of the weight's gradient, dw = dyᵀ·x: how dy and x are quantized.

    `from_fprop`: quantize x̂, the dequantized operand of the forward, instead of x.
    """

    dy: Spec | None = None
    x: Spec | None = None
    from_fprop: bool = False
    __repr__ = short_repr


@dataclass(frozen=True)
class Recipe:
    """How each GEMM of a layer quantizes its operands.

    Where fprop is quantized and a backward GEMM is not, that GEMM runs in BF16 on the dequantized forward operand.

    `mean_split`: subtract the mean over tokens μ from x before it is quantized, and multiply μ in fp32:
    y = Q(x - 1μᵀ)·Q(w)ᵀ + 1·(w·μ)ᵀ. Activations with a large common component then spend their 4 bits on the
    differences. μ depends on the batch, so the sampler never splits it off.

    `accumulate`: "fast" or "invariant", the order of the products' sums (see fp4ext.gemm). A policy asks for
    "invariant" where sampler and trainer have to agree.

    Raises:
        ValueError: a GEMM whose two operands have different RHTs, which would not cancel; an unknown `accumulate`.
    """

    fprop: Fprop = Fprop()
    dgrad: Dgrad = Dgrad()
    wgrad: Wgrad = Wgrad()
    mean_split: bool = False
    accumulate: str = "fast"
    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.accumulate not in ACCUMULATE:
            raise Refused(f"accumulate is {self.accumulate!r}; accepted: {', '.join(ACCUMULATE)}")
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
        """Why a row of y depends on other rows of x; None where it does not."""
        x = self.fprop.x
        if self.mean_split:
            return "mean_split subtracts a mean over the batch"
        if x is None:
            return None
        if x.needs_rng:
            return f"x is rounded or rotated at random ({x})"
        if x.block == "16x16":
            return f"x has 16x16 blocks, which 16 rows share ({x})"
        if x.fmt.has_global_scale and x.group != "row":
            return f"x has one outer scale for all rows ({x})"
        return None

    @property
    def key(self) -> str:
        """The recipe as one string, as the layers' ops take it; `parse` reads it. It leaves out mean_split."""
        words = [_word(value) for gemm in (self.fprop, self.dgrad, self.wgrad) for value in vars(gemm).values()]
        return " ".join([*words, self.accumulate])

    @classmethod
    @functools.cache
    def parse(cls, key: str) -> Recipe:
        """The recipe of a key, without mean_split: the layer splits the mean before it calls an op."""
        x, w, dgrad_dy, dgrad_w, dgrad_from_fprop, wgrad_dy, wgrad_x, wgrad_from_fprop, accumulate = key.split()
        return cls(
            Fprop(_spec(x), _spec(w)),
            Dgrad(_spec(dgrad_dy), _spec(dgrad_w), dgrad_from_fprop == "True"),
            Wgrad(_spec(wgrad_dy), _spec(wgrad_x), wgrad_from_fprop == "True"),
            accumulate=accumulate,
        )

    @property
    def quantizes(self) -> bool:
        """Whether any operand is quantized."""
        return any((*_specs(self.fprop), *_specs(self.dgrad), *_specs(self.wgrad)))

    @property
    def needs_rng(self) -> bool:
        """Whether any operand is rounded or rotated at random."""
        return any(s.needs_rng for s in (*_specs(self.fprop), *_specs(self.dgrad), *_specs(self.wgrad)))

    def check_backward(self) -> None:
        """Raises ValueError where the backward would read rotated forward operands, since it does not undo the RHT."""
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
        """Stored bits per element of the weight operand of fprop."""
        return self.fprop.w.fmt.bits_per_element if self.fprop.w else 16.0

    @property
    def saved_activation_bits(self) -> float:
        """Stored bits per element of the copy of x that is kept for wgrad."""
        spec = self.wgrad.x if self.wgrad.x and not self.wgrad.from_fprop else self.fprop.x
        return spec.fmt.bits_per_element if spec else 16.0


def _specs(gemm: Fprop | Dgrad | Wgrad) -> list[Spec]:
    return [s for s in vars(gemm).values() if isinstance(s, Spec)]


def _word(value: Spec | bool | None) -> str:
    return value.key if isinstance(value, Spec) else str(value)


def _spec(word: str) -> Spec | None:
    return None if word == "None" else Spec.parse(word)
