"""The policies that ship, as data. `get` returns one by its name, or reads one from a file (policy_file.py).

| policy | fprop x, w | dgrad dy, w | wgrad dy, x |
|---|---|---|---|
| bf16 | – | – | – |
| mxfp8 | MXFP8 ceil | same | same |
| nvidia (arXiv 2509.25149) | amax; w 16×16 | dy stochastic; the same 2-D w | RHT16; dy stochastic, x nearest |
| four_over_six (arXiv 2512.02010) | four_over_six; w 16×16 | dy stochastic; the same 2-D w | as nvidia |
| quartet2 (arXiv 2601.22813) | four_over_six | MS-EDEN per block, one RHT128, on dy and ŵᵀ | the same on dyᵀ and x̂ᵀ |
| end_to_end | sweep | MS-EDEN + sweep, two-stage RHT128, on dy and ŵᵀ | the same on dyᵀ and x̂ᵀ |
| end_to_end_sr | sweep | of end_to_end, but dy stochastic (minvar) | likewise |
| mxfp8_backward | sweep | MXFP8, of ŵᵀ | MXFP8, of x̂ᵀ |

In every 4-bit backward E[dx] = dy·ŵ, the derivative of the function that the forward computed: dgrad reads ŵ, or 2-D
blocks that are the same in both directions (tests/nn/test_unbiased_products.py). Where wgrad reads the forward's copy,
E[dw] = dyᵀ·x̂. nvidia and four_over_six quantize x again, so that their dw averages to about dyᵀ·x. That is not the
derivative of their forward: the two differ by 7.7e-3 to 9.1e-3 of the energy. Against dyᵀ·x a bias of about 3e-5
remains, since x is rounded to nearest under the RHT. The MXFP8 backward rounds to nearest.

These policies differ from their authors' code:

- nvidia: each call draws new signs for the RHT, where TransformerEngine has one vector and torchao one per layer. Block
  scales of stochastic operands are rounded up, which adds noise and no bias. Rotated values stay in fp32, where
  TransformerEngine rounds them to BF16, which changes 0.6 % of the codes on N(0, 1).
- four_over_six: dy and the x of wgrad have amax scales. The authors' layer uses 4/6 there too, which biases dw, since
  rounding after a choice by error is not unbiased.
- quartet2: S (docs/numerics.md, section 7) is computed over each block of 16, as in Algorithm 1 of the paper; the
  authors' Triton code computes it over a rotated vector of 128.
- end_to_end and quartet2 are unbiased in each operand and not in the product: both operands have one rotation, so the
  errors of dy and of x̂ are correlated where the two are parallel, and dw is too large there by 0.7 % and 0.8 %.
  end_to_end_sr removes that for about 1.8 times the variance (docs/numerics.md, section 8).
"""

from __future__ import annotations

from pathlib import Path

from ..errors import Refused
from . import policy_file
from .policy import SHIPPED, Policy
from .recipe import Dgrad, Fprop, Recipe, Wgrad
from .spec import Spec

_AMAX = Spec("nvfp4")
_TILE = Spec("nvfp4", block="16x16")
_SR = Spec("nvfp4", rounding="stochastic")
_FOUR_OVER_SIX = Spec("nvfp4", "four_over_six")
_FOUR_OVER_SIX_TILE = _FOUR_OVER_SIX.with_(block="16x16")
_SWEEP = Spec("nvfp4", "sweep")
_EDEN_BLOCK = Spec("nvfp4", "amax", "eden_block", rht="128")
_EDEN2 = Spec("nvfp4", "sweep", "eden", rht="128x2")
_SR2 = Spec("nvfp4", "minvar", "stochastic", rht="128x2")
_MXFP8 = Spec("mxfp8")

_NVIDIA_WGRAD = Wgrad(_SR.with_(rht="16"), _AMAX.with_(rht="16"))


def _both(spec: Spec) -> Fprop:
    return Fprop(spec, spec)


def _backward(spec: Spec, from_fprop: bool) -> tuple[Dgrad, Wgrad]:
    return Dgrad(spec, spec, from_fprop), Wgrad(spec, spec, from_fprop)


def _sampler(spec: Spec) -> Recipe:
    """One outer scale per row of x, so that a row's codes do not depend on the other rows of its batch.

    (One power of two for all rows would do as well, except for a row so much smaller than the others that its block
    scales are subnormal.)
    """
    return Recipe(Fprop(spec.with_(outer="row"), spec.with_(outer="pow2")))


SHIPPED |= {
    p.name: p
    for p in (
        Policy("bf16"),
        Policy("mxfp8", Recipe(_both(_MXFP8), *_backward(_MXFP8, False))),
        Policy("nvidia", Recipe(Fprop(_AMAX, _TILE), Dgrad(_SR, _TILE), _NVIDIA_WGRAD), _sampler(_AMAX)),
        Policy(
            "four_over_six",
            Recipe(Fprop(_FOUR_OVER_SIX, _FOUR_OVER_SIX_TILE), Dgrad(_SR, _FOUR_OVER_SIX_TILE), _NVIDIA_WGRAD),
            _sampler(_FOUR_OVER_SIX),
        ),
        Policy("quartet2", Recipe(_both(_FOUR_OVER_SIX), *_backward(_EDEN_BLOCK, True)), _sampler(_FOUR_OVER_SIX)),
        Policy("end_to_end", Recipe(_both(_SWEEP), *_backward(_EDEN2, True)), _sampler(_SWEEP)),
        Policy(
            "end_to_end_sr",
            Recipe(_both(_SWEEP), Dgrad(_SR2, _EDEN2, True), Wgrad(_SR2, _EDEN2, True)),
            _sampler(_SWEEP),
        ),
        Policy("mxfp8_backward", Recipe(_both(_SWEEP), *_backward(_MXFP8, True)), _sampler(_SWEEP)),
    )
}


def names() -> list[str]:
    """The names of the policies that ship."""
    return list(SHIPPED)


def get(name: str | Path | Policy) -> Policy:
    """The policy of that name, or of that .toml or .json file.

    Raises:
        ValueError: an unknown name, with a list of those that ship; or a file that holds no policy (policy_file.load).
    """
    if isinstance(name, Policy):
        return name
    if isinstance(name, Path) or (isinstance(name, str) and name.endswith(policy_file.SUFFIXES)):
        return policy_file.load(name)
    if not isinstance(name, str) or name not in SHIPPED:
        raise Refused(f"unknown policy {name!r}; policies: {', '.join(SHIPPED)}, or a .toml file")
    return SHIPPED[name]
