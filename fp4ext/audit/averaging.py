"""The averaging law: which part of an error averages out, and which part stays.

Draw b of a quantizer has the error e_b = n_b + d. The noise n_b is independent between draws and has mean zero; the
drift d is the same in all draws. The mean of B draws then has the error

    err(B) = E‖(e_1 + … + e_B)/B‖² = variance/B + floor,    variance = E‖n‖²,   floor = ‖d‖².

Averages over tokens and steps therefore remove noise, and keep a drift, however small it is beside the noise of one
draw. The inner products of the draws' errors give unbiased estimates of both:

    floor = mean of ⟨e_a, e_b⟩ over a ≠ b,    variance = mean of ‖e_a‖² less the floor,

which fits the law to the averages over all subsets of the draws. All errors are relative, ‖·‖² over ‖truth‖².
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

AT = 256  # draws at which docs/numerics.md, 8, requires B·err(mean of B)/err(1) to be within 10 % of 1
UNBIASED = 1.1


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval; for an exact value low = mean = high."""

    mean: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Interval:
        return cls(value, value, value)

    @classmethod
    def around(cls, mean: float, error: float, freedom: int) -> Interval:
        """By Student's t, from the standard error of the mean and its degrees of freedom."""
        half = t_quantile(freedom) * error
        return cls(mean, mean - half, mean + half)

    @classmethod
    def of(cls, samples: Tensor) -> Interval:
        """The interval of the mean of independent samples [B]."""
        if len(samples) < 2:
            return cls.exact(samples.mean().item())
        return cls.around(samples.mean().item(), samples.std().item() / math.sqrt(len(samples)), len(samples) - 1)


@dataclass(frozen=True)
class Law:
    """err(B) = variance/B + floor, fitted to draws.

    Attributes:
        variance: the noise of one draw, relative to ‖truth‖².
        floor: the error that no average removes, relative to ‖truth‖²; its unbiased estimate may be negative.
        curve: (B, relative error of the mean of the first B draws) for B = 1, 2, 4, …
        draws: the number of draws; 1 where nothing is random, and the floor is then the whole error.
    """

    variance: float
    floor: Interval
    curve: tuple[tuple[int, float], ...]
    draws: int

    def err(self, b: int) -> float:
        """The fitted error of the mean of b draws, relative to ‖truth‖²."""
        return self.variance / b + max(self.floor.mean, 0.0)

    @property
    def ratio(self) -> Interval:
        """B·err(B)/err(1) at B = 256: 1 without drift, 256 if the whole error is drift."""
        return Interval(
            *(ratio_of(self.variance, floor) for floor in (self.floor.mean, self.floor.low, self.floor.high))
        )

    @property
    def drifts(self) -> bool:
        """Whether the confidence interval of `ratio` is above the limit of docs/numerics.md, 8."""
        return self.ratio.low > UNBIASED


def ratio_of(variance: float, floor: float) -> float:
    """B·err(B)/err(1) at B = AT, within [0, AT]; 1 for an error of zero."""
    one = variance + floor
    return min(max((variance + AT * floor) / one, 0.0), float(AT)) if one > 0 else 1.0


def fit(errors: Tensor, power: float) -> Law:
    """Fit the law to the errors of draws.

    Args:
        errors: [B, …], the error of each draw; B = 1 for an error that is not random.
        power: ‖truth‖² over the same entries.
    """
    flat = errors.flatten(1).double()
    b = len(flat)
    if power <= 0:
        return Law(0.0, Interval.exact(0.0), (), b)
    gram = flat @ flat.T / power
    if b == 1:
        return Law(0.0, Interval.exact(gram.item()), ((1, gram.item()),), 1)
    one = gram.diagonal().mean().item()
    off = gram.sum(1) - gram.diagonal()
    floor = (off.sum() / (b * (b - 1))).item()
    sizes = [2**i for i in range(b.bit_length()) if 2**i <= b]
    curve = tuple((n, (gram[:n, :n].sum() / n**2).item()) for n in sizes)
    if b == 2:
        return Law(one - floor, Interval(floor, -one, one), curve, b)
    # Jackknife: the spread of the estimates that leave one draw out gives the standard error.
    without = (off.sum() - 2 * off) / ((b - 1) * (b - 2))
    error = ((b - 1) / b * (without - without.mean()).square().sum()).sqrt().item()
    return Law(one - floor, Interval.around(floor, error, b - 1), curve, b)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by four terms of its expansion around the normal's 1.96."""
    z, inverse = 1.959964, 1 / freedom
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term * inverse**i for i, term in enumerate(terms))
