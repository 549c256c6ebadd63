"""explain: what rounding does to a number, once and a thousand times; what a block's scale does to sixteen.

Nearest rounding takes 3.2 on the grid {3, 4} to 3, always: it errs by −0.2, and so does the mean of a thousand.
Stochastic rounding takes it to 4 with probability 0.2 and to 3 otherwise: it errs more each time, and its mean is 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import Refused
from ..functional.quantization import quantize
from ..policy.spec import Spec

E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Rounded:
    """A number on a grid.

    Attributes:
        low, high: its neighbours, both the number itself where it is on the grid, both the end where it is outside.
        up: the probability that stochastic rounding goes up.
        nearest: where nearest rounding goes; ties to the neighbour of even place in the grid.
        draws: how many times `high` and `low` came up.
    """

    value: float
    low: float
    high: float
    up: float
    nearest: float
    draws: tuple[int, int]

    @property
    def mean(self) -> float:
        """Of the draws."""
        highs, lows = self.draws
        return (highs * self.high + lows * self.low) / (highs + lows)

    @property
    def expected_error(self) -> float:
        """How far the mean of so many draws is off, typically."""
        return (self.high - self.low) * math.sqrt(self.up * (1 - self.up) / sum(self.draws))


def rounded(value: float, grid: tuple[float, ...] = E2M1_GRID, draws: int = 1000, seed: int = 0) -> Rounded:
    """Round a number on a grid, nearest and stochastically.

    Raises:
        Refused: a grid of fewer than two values, or that does not rise; a number or a grid that is not finite.
    """
    if len(grid) < 2 or any(not a < b for a, b in zip(grid, grid[1:], strict=False)):
        raise Refused(f"grid is {', '.join(map(str, grid))}; accepted: two or more rising numbers, such as 3,4")
    if not all(map(math.isfinite, (value, *grid))):
        raise Refused(f"value is {value}; accepted: a finite number on a finite grid")
    if draws < 1:
        raise Refused(f"draws is {draws}; accepted: a whole number from 1")
    sign = -1.0 if value < 0 <= grid[0] else 1.0  # a grid of magnitudes serves both signs
    v = min(max(sign * value, grid[0]), grid[-1])
    place = max(i for i, g in enumerate(grid) if g <= v)
    low, high = grid[place], grid[min(place + (grid[place] < v), len(grid) - 1)]
    up = (v - low) / (high - low) if high > low else 0.0
    even = low if place % 2 == 0 else high
    nearest = even if up == 0.5 else high if up > 0.5 else low
    highs = int((torch.rand(draws, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) < up).sum())
    return Rounded(value, sign * low, sign * high, up, sign * nearest, (highs, draws - highs))


def running_means(r: Rounded, draws: int, seed: int = 0) -> list[float]:
    """The mean of the first 1, 2, … draws of stochastic rounding."""
    ups = torch.rand(draws, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) < r.up
    values = torch.where(ups, r.high, r.low).double()
    return (values.cumsum(0) / torch.arange(1, draws + 1)).tolist()


@dataclass(frozen=True)
class Block:
    """A block under a spec: its decode scale, each value's image, the relative error."""

    spec: Spec
    scale: float
    images: tuple[float, ...]
    error: float


def block(values: list[float], spec: Spec, seed: int = 0) -> Block:
    """Quantize some numbers as one block. Raises Refused for more than a block holds, or a spec that rotates."""
    if not 1 <= len(values) <= spec.fmt.block:
        raise Refused(f"{len(values)} numbers; accepted: 1 to {spec.fmt.block}, a block of {spec.format}")
    if spec.rht != "none":
        raise Refused(f"spec is {spec}; accepted: one without an rht, whose images are of rotated values")
    x = torch.tensor([values])
    q = quantize(x, spec, rng=seed)
    images = q.dequantize(torch.float32)
    outer = 1.0 if q.global_scale is None else q.global_scale.item()
    error = ((images - x).double().square().sum() / x.double().square().sum().clamp_min(1e-300)).item()
    return Block(spec, q.scales.float().flatten()[0].item() * outer, tuple(images[0].tolist()), error)
