"""measure: what one Spec does to one tensor, as one operand of one GEMM.

Error and drift are taken in fp64 against the truth in its own frame: an operand that is rotated (RHT) is rotated back,
since each draw rotates differently and only what comes back can be averaged. Range faults, underflow and saturation,
are counted where they happen, on the rotated values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..qtensor import QTensor
from ..quantize import quantize
from ..reference import hadamard
from ..spec import Spec
from .averaging import Interval, Law, fit

DRAWS = 32
DUST = 2.0**-24  # of the largest magnitude: what rounding leaves of an fp32 sum that cancels; nothing is lost with it
ENTRIES = 1 << 16  # elements whose errors are followed; where nothing is random, all of them


@dataclass(frozen=True)
class Measured:
    """What was measured of an operand or a product.

    Attributes:
        mse: E‖x̂ - x‖²/‖x‖², of one draw.
        signed: Σ(x̂ - x)·sign(x)/Σ|x|: below zero where magnitudes shrink.
        misalignment: 1 - E⟨x̂, x⟩/‖x‖²: the share of x that its image lost along x itself.
        law: noise and drift.
        underflow: share of blocks that hold something and decode to nothing.
        flushed: share of elements that are not zero and become it.
        saturation: share of blocks whose largest element is cut by more than half a step of its grid.
        non_finite: share of blocks that decode to NaN.
        histogram: how many blocks have each scale byte, 256 counts; empty for a product.
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
        """Signal to error of one draw, dB."""
        return -10 * math.log10(self.mse) if self.mse > 0 else math.inf

    @property
    def snr_ratio(self) -> float:
        """‖x‖/‖noise‖ of one draw: what the √3 rule asks of a gradient."""
        return 1 / math.sqrt(self.law.variance) if self.law.variance > 0 else math.inf


class Draws:
    """Collects the errors of draws against a truth: `add` each, then `measured`."""

    def __init__(self, truth: Tensor):
        self.truth = truth.double().flatten()
        self.power, self.magnitude = self.truth.square().sum().item(), self.truth.abs().sum().item()
        self.errors: list[Tensor] = []

    def add(self, values: Tensor) -> None:
        """One draw, of the truth's shape. What is not finite is left out of the error; it is counted elsewhere."""
        self.errors.append((values.flatten() - self.truth).nan_to_num(0.0, 0.0, 0.0))

    def measured(self, **counts) -> Measured:
        """What the draws add up to."""
        errors = torch.stack(self.errors)
        mse = errors.square().sum(1).mean().item() / self.power if self.power else 0.0
        along = (errors @ self.truth).mean().item() / self.power if self.power else 0.0
        signed = errors @ self.truth.sign() / self.magnitude if self.magnitude else torch.zeros(1)
        return Measured(mse, Interval.of(signed), -along, fit(errors, self.power), **counts)


def nearest(found: dict[str, Measured]) -> str:
    """Of what was measured against several truths: the truth that the mean comes closest to."""
    return min(found, key=lambda of: max(found[of].law.floor.mean, 0.0) + 1e-9 * found[of].mse)


def measure(
    source: Tensor | QTensor, spec: Spec, axis: int, role: str, truths: dict[str, Tensor], draws: int = DRAWS
) -> tuple[str, Measured]:
    """What `spec` does to a tensor.

    Args:
        source: [rows, cols], fp32; or the QTensor of the forward, where the recipe quantizes that anew.
        axis: -1 or -2, as in quantize: along which axis the GEMM contracts.
        truths: what the operand may stand for, of source's shape, by name.
        draws: repeated where anything is random; one draw where nothing is.

    Returns:
        The name of the truth that the operand comes closest to on average, and the numbers against it.
    """
    turn = (lambda t: t) if axis == -1 else (lambda t: t.mT)
    values = turn(source.dequantize(torch.float32) if isinstance(source, QTensor) else source.float())
    rows = sampled(values.shape[0], values.shape[1]) if spec.needs_rng else slice(None)
    collected = {of: Draws(turn(truth)[rows]) for of, truth in truths.items()}
    counts = None
    for draw in range(draws if spec.needs_rng else 1):
        rng = torch.tensor([0x5EED, draw])
        q = quantize(source, spec, axis=axis, rng=rng, role=role)
        image = estimate(q.dequantize(torch.float32)[rows], spec, rng)
        for each in collected.values():
            each.add(image)
        counts = counts or range_faults(q, spec, values, rng)
    counts.pop("mse")  # of one draw; that of all draws is measured below
    found = {of: each.measured(**counts) for of, each in collected.items()}
    of = nearest(found)
    return of, found[of]


def sampled(rows: int, width: int) -> Tensor:
    """Which rows stand for all: ENTRIES elements or a little more."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[: -(-ENTRIES // width)].sort().values


def estimate(stored: Tensor, spec: Spec, rng: Tensor) -> Tensor:
    """x̂ [rows, K] in the frame of x: rotated back, where the spec rotates."""
    if spec.rht == "none":
        return stored
    n, stages = hadamard.parse(spec.rht)
    k = stored.shape[-1]
    n = hadamard.effective_n(n, k)
    back = _inverse(n, stages, *rng.tolist())
    whole = torch.nn.functional.pad(stored, (0, -k % n))
    return (whole.unflatten(-1, (-1, n)) @ back).flatten(-2)[..., :k]


@lru_cache(maxsize=256)
def _inverse(n: int, stages: int, seed: int, offset: int) -> Tensor:
    """The inverse rotation as a matrix [n, n]; row i is where the image's e_i came from."""
    return hadamard.inverse_rht(torch.eye(n, dtype=torch.float64), n, stages, torch.tensor([seed, offset])).float()


def range_faults(q: QTensor, spec: Spec, x: Tensor, rng: Tensor | None) -> dict:
    """Underflow, saturation, NaN blocks, the error and the histogram of scale bytes of a quantized x [rows, K]."""
    fmt, k = q.format, q.shape[-1]
    r = x if spec.rht == "none" else hadamard.rht(x, *hadamard.parse(spec.rht), rng)[..., :k]
    pad = fmt.padded(k) - k
    r, back = (
        torch.nn.functional.pad(t, (0, pad)).unflatten(-1, (-1, fmt.block)) for t in (r, q.dequantize(torch.float32))
    )
    outer = 1.0 if q.global_scale is None else q.global_scale[..., None]
    scale = (q.scales.float()[..., None] * outer).nan_to_num(0.0)
    largest = r.abs().nan_to_num(0.0, 0.0, 0.0).max() if r.numel() else 0.0
    held = (r.abs() > DUST * largest).any(-1) & torch.isfinite(r).all(-1)
    # Were the grid to go on, the next step up would begin half a step beyond its end.
    element = fmt.element
    cut = (r.abs() > (element.max + element.top_step / 2) * scale) & (scale > 0)
    blocks = max(1, int(held.sum()))
    finite = torch.isfinite(r) & torch.isfinite(back)
    power = r.where(finite, 0).double().square().sum().item()
    return {
        "mse": (back - r).where(finite, 0).double().square().sum().item() / power if power else 0.0,
        "underflow": int((held & (back == 0).all(-1)).sum()) / blocks,
        "flushed": ((r != 0) & (back == 0)).sum().item() / max(1, int((r != 0).sum())),
        "saturation": int((held & cut.any(-1)).sum()) / blocks,
        "non_finite": int(back.isnan().any(-1).sum()) / max(1, back[..., 0].numel()),
        "histogram": tuple(torch.bincount(q.scales.view(torch.uint8).flatten().long(), minlength=256).tolist()),
    }
