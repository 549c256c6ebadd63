"""Report: what an audit found: rows of numbers, and the faults among them, each named with its place."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

from ..nn.noise import SQRT3
from .layer import Row
from .operand import Measured

DRIFT = 1e-4  # of a gradient's energy: a bias of 1 % of its norm
UNDERFLOW = 0.01  # of the blocks
SATURATION = 0.05  # of the blocks


@dataclass(frozen=True)
class Fault:
    """Something that a person should look at.

    Attributes:
        policy, module, gemm, what: where.
        kind: "drift", "saturation", "underflow", "non-finite" or "noise".
        size: the number that gave it away: floor, share of blocks, or ‖g‖/‖noise‖.
        text: the finding and what would help, in a sentence.
    """

    policy: str
    module: str
    gemm: str
    what: str
    kind: str
    size: float
    text: str


@dataclass
class Report:
    """What `audit` found.

    Attributes:
        rows: policy → its rows, layer by layer.
        ratios: policy → layer → ‖g‖/‖noise‖ of the weight gradient, all layers rounding at once (gradient_noise):
            below √3 a gradient no longer helps. A layer's noise may come from those above it; a fault of kind "noise"
            is a layer whose own rounding is enough. inf where nothing in the backward is random.
        losses: policy → loss on the batches, mean; "bf16" is the plain model's.
        layers: layer → facts of its tensors: shape, amax of each batch, outlier channels.
        left: policy → module → why it is not quantized.
        facts: what was measured, on what.
    """

    rows: dict[str, list[Row]] = field(default_factory=dict)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    layers: dict[str, dict] = field(default_factory=dict)
    left: dict[str, dict[str, str]] = field(default_factory=dict)
    facts: dict = field(default_factory=dict)

    @property
    def policies(self) -> list[str]:
        return list(self.rows)

    @property
    def faults(self) -> list[Fault]:
        """All faults, the largest of each kind first."""
        found = [fault for policy in self.rows for fault in self._faults(policy)]
        return sorted(found, key=lambda f: (f.policy, f.kind, f.size if f.kind == "noise" else -f.size))

    @property
    def grouped(self) -> list[list[Fault]]:
        """The faults of one kind at one place of a policy together, whatever the layer, the largest first: what all
        layers have is the policy's own doing."""
        groups: dict[tuple, list[Fault]] = {}
        for fault in self.faults:
            groups.setdefault((fault.policy, fault.kind, fault.gemm, fault.what), []).append(fault)
        return list(groups.values())

    def _faults(self, policy: str):
        for row in self.rows[policy]:
            m, place = row.measured, (policy, row.module, row.gemm, row.what)
            if row.gemm != "fprop" and m.law.drifts and m.law.floor.low > DRIFT:
                yield Fault(*place, "drift", m.law.floor.mean, _drift(row, m))
            if m.saturation > SATURATION:
                why = f"{m.saturation:.1%} of the blocks of {row.what} lose the top of their largest element"
                yield Fault(*place, "saturation", m.saturation, f"{why}; a scale rule that rounds up would keep it")
            if m.underflow > UNDERFLOW:
                why = f"{m.underflow:.1%} of the blocks of {row.what} decode to nothing: too small beside the largest"
                yield Fault(*place, "underflow", m.underflow, f"{why}; an outer scale a row, or MXFP8, would keep them")
            if m.non_finite:
                why = f"{m.non_finite:.1%} of the blocks of {row.what} hold a NaN or an infinity"
                yield Fault(*place, "non-finite", m.non_finite, why)
            if row.what == "dw" and m.snr_ratio < SQRT3:
                why = f"the weight gradient is {m.snr_ratio:.2f} times the noise of this layer's own rounding, under √3"
                text = f"{why}; more bits in its wgrad or a larger batch would help"
                yield Fault(*place, "noise", m.snr_ratio, text)

    def to_json(self) -> dict:
        """Everything, as what json.dumps takes; what is not finite is None."""
        rows = {
            policy: [{**asdict(row), "spec": row.spec.key if row.spec else None} for row in rows]
            for policy, rows in self.rows.items()
        }
        faults = [asdict(fault) for fault in self.faults]
        return _finite({**vars(self), "rows": rows, "faults": faults})


def _drift(row: Row, m: Measured) -> str:
    floor = f"{m.law.floor.mean:.1e} of the energy of {row.what} stays however many draws are averaged"
    if m.law.draws == 1:
        return f"{floor}: nothing in it is random; stochastic or MS-EDEN rounding would average out"
    return f"{floor} (err({m.law.draws}) fits {m.law.variance:.1e}/B + {m.law.floor.mean:.1e})"


def _finite(value):
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
