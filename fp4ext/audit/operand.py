"""What one Spec does to one tensor, as one operand of one GEMM.

Error and drift are computed in fp64 against the unrotated truth: an operand with RHT is rotated back, since each draw
has another rotation and only values that are rotated back can be averaged. Underflow and saturation are counted on the
rotated values, where they occur.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..functional.qtensor import QTensor
from ..functional.quantization import quantize
from ..policy.spec import Spec
from ..reference import hadamard
from .averaging import Interval, Law, fit

DRAWS = 32
DUST = 2.0**-24  # relative to the largest magnitude: the rounding error of fp32 sums that cancel, which may underflow
ENTRIES = 1 << 16  # elements whose errors are kept where draws are random; else the errors of all are


@dataclass(frozen=True)
class Measured:
    """The measurements of an operand or a product; x is the truth and x̂ a draw.

    Attributes:
        mse: E‖x̂ - x‖²/‖x‖² of one draw.
        signed: Σ(x̂ - x)·sign(x)/Σ|x|, negative if magnitudes shrink.
        misalignment: 1 - E⟨x̂, x⟩/‖x‖², the relative loss along x.
        law: noise and drift.
        underflow: share of the nonzero blocks that decode to zero.
        flushed: share of the nonzero elements that decode to zero.
        saturation: share of blocks whose largest element is cut by more than half a step of its grid.
        non_finite: share of blocks that decode to NaN.
        histogram: the number of blocks with each scale byte, 256 counts; empty for a product.
    """

    mse: float
    signed: Interval
    misalignment: float
    law: Law
    underflow: float = 0.0
    flushed: float = 0.0
    saturation: float = 0.0
    non_finite: float = 0.0
    histogram: tuple[int, ...] = ()

    @property
    def snr(self) -> float:
        """Signal-to-error ratio of one draw, dB."""
        return -10 * math.log10(self.mse) if self.mse > 0 else math.inf

    @property
    def snr_ratio(self) -> float:
        """‖x‖/‖noise‖ of one draw, which the √3 rule wants above √3 for a gradient."""
        return 1 / math.sqrt(self.law.variance) if self.law.variance > 0 else math.inf


class Draws:
    """Collects the errors of draws against a truth: `add` each, then `measured`."""

    def __init__(self, truth: Tensor):
        self.truth = truth.double().flatten()
        self.power, self.magnitude = self.truth.square().sum().item(), self.truth.abs().sum().item()
        self.errors: list[Tensor] = []

    def add(self, values: Tensor) -> None:
        """Add a draw, in the truth's shape. Values that are not finite count as exact; Tally counts them."""
        self.errors.append((values.flatten() - self.truth).nan_to_num(0.0, 0.0, 0.0))

    @classmethod
    def joined(cls, parts: Sequence[Draws]) -> Draws:
        """The draws of several matrices as draws of one."""
        if len(parts) == 1:
            return parts[0]
        one = cls(torch.cat([part.truth for part in parts]))
        one.errors = [torch.cat(errors) for errors in zip(*(part.errors for part in parts), strict=True)]
        return one

    def measured(self, **counts: Any) -> Measured:
        """The measurements over all draws; `counts` are further fields of Measured."""
        errors = torch.stack(self.errors)
        mse = errors.square().sum(1).mean().item() / self.power if self.power else 0.0
        along = (errors @ self.truth).mean().item() / self.power if self.power else 0.0
        signed = errors @ self.truth.sign() / self.magnitude if self.magnitude else torch.zeros(1)
        return Measured(mse, Interval.of(signed), -along, fit(errors, self.power), **counts)


@dataclass(frozen=True)
class Tally:
    """Counts over a quantized matrix. The sum of two Tallies counts both matrices.

    Attributes:
        held: finite blocks that are not zero. empty: those of them that decode to zero. cut: those of them whose
            largest element is cut. blocks: all blocks. nan: blocks that decode to NaN.
        elements: nonzero elements. flushed: those of them that decode to zero.
        error, power: ‖x̂ - x‖² and ‖x‖² over finite values; both rotated if the spec has an RHT.
        histogram: blocks by scale byte, [256].
    """

    held: int
    empty: int
    cut: int
    blocks: int
    nan: int
    elements: int
    flushed: int
    error: float
    power: float
    histogram: Tensor

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def mse(self) -> float:
        """‖x̂ - x‖²/‖x‖² of this draw."""
        return self.error / self.power if self.power else 0.0

    def shares(self) -> dict:
        """The counts as shares, named as in Measured."""
        return {
            "underflow": self.empty / max(1, self.held),
            "flushed": self.flushed / max(1, self.elements),
            "saturation": self.cut / max(1, self.held),
            "non_finite": self.nan / max(1, self.blocks),
            "histogram": tuple(self.histogram.tolist()),
        }


@dataclass(frozen=True)
class Seen:
    """The draws of one matrix: their errors against each truth, and the counts of the first draw."""

    draws: dict[str, Draws]
    tally: Tally


def nearest(found: dict[str, Measured]) -> str:
    """The name of the truth to which the mean over draws is closest."""
    return min(found, key=lambda of: max(found[of].law.floor.mean, 0.0) + 1e-9 * found[of].mse)


def measured(seen: Sequence[Seen]) -> tuple[str, Measured]:
    """(the name of the truth to which the mean over draws is closest, the measurements against it).

    Args:
        seen: the matrices of one operand: one, or one for each expert.
    """
    tally = functools.reduce(Tally.__add__, (one.tally for one in seen))
    found = {of: Draws.joined([one.draws[of] for one in seen]).measured(**tally.shares()) for of in seen[0].draws}
    of = nearest(found)
    return of, found[of]


def observe(
    source: Tensor | QTensor,
    spec: Spec,
    axis: int,
    role: str,
    truths: dict[str, Tensor],
    draws: int = DRAWS,
    entries: int = ENTRIES,
) -> Seen:
    """Quantize a matrix repeatedly.

    Args:
        source: [rows, cols] fp32; or the forward's QTensor, if the recipe requantizes that.
        axis: the contraction axis, -1 or -2, as in quantize.
        role: the operand, as in quantize.
        truths: name → possible truth, in source's shape.
        draws: the number of draws if the spec is random; else one draw is made.
        entries: the number of elements whose errors are kept if the spec is random.
    """
    turn = (lambda t: t) if axis == -1 else (lambda t: t.mT)
    values = turn(source.dequantize(torch.float32) if isinstance(source, QTensor) else source.float())
    rows = sampled(values.shape[0], values.shape[1], entries) if spec.needs_rng else slice(None)
    collected = {of: Draws(turn(truth)[rows]) for of, truth in truths.items()}
    for draw in range(draws if spec.needs_rng else 1):
        rng = torch.tensor([0x5EED, draw])
        q = quantize(source, spec, axis=axis, rng=rng, role=role)
        if draw == 0:
            tally = range_faults(q, spec, values, rng)
        image = estimate(whole(q)[rows], values.shape[1], spec, rng)
        for each in collected.values():
            each.add(image)
    return Seen(collected, tally)


def sampled(rows: int, width: int, entries: int = ENTRIES) -> Tensor:
    """A random choice of rows with `entries` elements or slightly more; int64, sorted."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randperm(rows, generator=generator)[: -(-entries // max(1, width))].sort().values


def whole(q: QTensor) -> Tensor:
    """The decoded fp32 values with their padding, which holds a part of x if x was rotated."""
    return replace(q, shape=torch.Size((*q.shape[:-1], q.format.padded(q.shape[-1])))).dequantize(torch.float32)


def estimate(stored: Tensor, k: int, spec: Spec, rng: Tensor) -> Tensor:
    """x̂ [rows, K] from decoded values with padding; rotated back if the spec has an RHT."""
    if spec.rht == "none":
        return stored[..., :k]
    n, stages = hadamard.parse(str(spec.rht))
    n = hadamard.effective_n(n, k)
    back = _inverse(n, stages, *rng.tolist())
    return (stored.unflatten(-1, (-1, n)) @ back).flatten(-2)[..., :k]


@functools.lru_cache(maxsize=256)
def _inverse(n: int, stages: int, seed: int, offset: int) -> Tensor:
    """The inverse rotation as a matrix [n, n]; row i is where the image's e_i came from."""
    return hadamard.inverse_rht(torch.eye(n, dtype=torch.float64), n, stages, torch.tensor([seed, offset])).float()


def range_faults(q: QTensor, spec: Spec, x: Tensor, rng: Tensor | None) -> Tally:
    """Underflow, saturation, NaN blocks, the error and the histogram of scale bytes of a quantized x [rows, K]."""
    fmt = q.format
    r = x if spec.rht == "none" else hadamard.rht(x, *hadamard.parse(str(spec.rht)), rng)
    r = torch.nn.functional.pad(r, (0, fmt.padded(q.shape[-1]) - r.shape[-1]))
    r, back = (t.unflatten(-1, (-1, fmt.block)) for t in (r, whole(q)))
    outer = 1.0 if q.global_scale is None else q.global_scale[..., None]
    scale = (q.scales.float()[..., None] * outer).nan_to_num(0.0)
    largest = r.abs().nan_to_num(0.0, 0.0, 0.0).max() if r.numel() else 0.0
    held = (r.abs() > DUST * largest).any(-1) & torch.isfinite(r).all(-1)
    # A grid that went on would round values up from half a step beyond this one's end.
    element = fmt.element
    cut = (r.abs() > (element.max + element.top_step / 2) * scale) & (scale > 0)
    finite = torch.isfinite(r) & torch.isfinite(back)
    return Tally(
        held=int(held.sum()),
        empty=int((held & (back == 0).all(-1)).sum()),
        cut=int((held & cut.any(-1)).sum()),
        blocks=back[..., 0].numel(),
        nan=int(back.isnan().any(-1).sum()),
        elements=int((r != 0).sum()),
        flushed=int(((r != 0) & (back == 0)).sum()),
        error=(back - r).where(finite, 0).double().square().sum().item(),
        power=r.where(finite, 0).double().square().sum().item(),
        histogram=torch.bincount(q.scales.view(torch.uint8).flatten().long(), minlength=256),
    )
