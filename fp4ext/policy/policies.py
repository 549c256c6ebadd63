"""The policies that ship, as data. `get(name)` gives one, or that of a file (policy_file.py); `with_(…)` changes it.

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
blocks that are the same in both directions (tests/nn/test_unbiased_products.py). E[dw] = dyᵀ·x̂ where wgrad reads the
forward's copy. nvidia and four_over_six quantize x anew, so their dw averages to about dyᵀ·x, which is not the
derivative of their forward (7.7e-3 to 9.1e-3 of its energy apart), with a floor of about 3e-5: x is rounded to nearest
under the RHT. MXFP8's backward rounds to nearest.

Where these differ from their authors' code:

- nvidia: the RHT's signs are drawn anew at every call, where TransformerEngine has one vector and torchao one per
  layer; scales of stochastic operands are rounded up, which adds noise and no bias; rotated values stay in fp32, where
  TransformerEngine rounds them to BF16, which changes 0.6 % of the codes on N(0, 1).
- four_over_six: dy and wgrad's x keep amax scales. The authors' layer uses 4/6 there too, which leaves a bias in dw,
  since rounding after a choice by error is not unbiased.
- quartet2: S is taken over each block of 16, as Algorithm 1 of the paper has it; the authors' Triton code takes it over
  a rotated vector of 128.
- end_to_end and quartet2 are unbiased in each operand, not in the product: under one rotation the errors of dy and of
  x̂ are correlated where the two are parallel, and dw is too large by 0.7 % (0.8 %) there. end_to_end_sr removes that
  for about 1.8 times the variance (docs/numerics.md, 8).
"""

from __future__ import annotations

from pathlib import Path

from . import policy_file
from .policy import Policy
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


def _backward(spec: Spec, from_fprop: bool) -> dict:
    return {"dgrad": Dgrad(spec, spec, from_fprop), "wgrad": Wgrad(spec, spec, from_fprop)}


def _sampler(spec: Spec) -> Recipe:
    """A row's codes must not depend on its batch mates: an outer scale a row. (A power of two for all rows would do
    except where a row is so small beside its mates that its block scales are subnormal.)"""
    return Recipe(Fprop(spec.with_(outer="row"), spec.with_(outer="pow2")))


_POLICIES = {
    p.name: p
    for p in (
        Policy("bf16"),
        Policy("mxfp8", Recipe(_both(_MXFP8), **_backward(_MXFP8, False))),
        Policy("nvidia", Recipe(Fprop(_AMAX, _TILE), Dgrad(_SR, _TILE), _NVIDIA_WGRAD), _sampler(_AMAX)),
        Policy(
            "four_over_six",
            Recipe(Fprop(_FOUR_OVER_SIX, _FOUR_OVER_SIX_TILE), Dgrad(_SR, _FOUR_OVER_SIX_TILE), _NVIDIA_WGRAD),
            _sampler(_FOUR_OVER_SIX),
        ),
        Policy("quartet2", Recipe(_both(_FOUR_OVER_SIX), **_backward(_EDEN_BLOCK, True)), _sampler(_FOUR_OVER_SIX)),
        Policy("end_to_end", Recipe(_both(_SWEEP), **_backward(_EDEN2, True)), _sampler(_SWEEP)),
        Policy(
            "end_to_end_sr",
            Recipe(_both(_SWEEP), Dgrad(_SR2, _EDEN2, True), Wgrad(_SR2, _EDEN2, True)),
            _sampler(_SWEEP),
        ),
        Policy("mxfp8_backward", Recipe(_both(_SWEEP), **_backward(_MXFP8, True)), _sampler(_SWEEP)),
    )
}


def names() -> list[str]:
    """The names of the policies that ship."""
    return list(_POLICIES)


def get(name: str | Path | Policy) -> Policy:
    """The policy of that name, or of that .toml or .json file. Raises ValueError, listing the names there are."""
    if isinstance(name, Policy):
        return name
    if isinstance(name, Path) or (isinstance(name, str) and name.endswith(policy_file.SUFFIXES)):
        return policy_file.load(name)
    if not isinstance(name, str) or name not in _POLICIES:
        raise ValueError(f"unknown policy {name!r}; policies: {', '.join(_POLICIES)}, or a .toml file")
    return _POLICIES[name]
