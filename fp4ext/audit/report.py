"""Report: the measurements of an audit, and the faults among them with their places."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..nn.noise import SQRT3
from .layer import Row

UNDERFLOW = 0.01  # of the blocks
SATURATION = 0.05  # of the blocks


@dataclass(frozen=True)
class Fault:
    """A measurement beyond its limit.

    Attributes:
        policy, module, gemm, what: its place.
        kind: "drift", "saturation", "underflow", "non-finite" or "noise".
        size: the measurement: a floor, a share of blocks, or ‖g‖/‖noise‖.
        text: a sentence with the finding and what would help.
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
    """The result of an audit.

    Attributes:
        rows: policy → its rows, in the order of layers.
        ratios: policy → layer → ‖g‖/‖noise‖ of the weight gradient while all layers round (gradient_noise). Below √3
            the gradient no longer helps. Part of the noise may come from other layers, whereas a fault of kind "noise"
            counts the layer's own rounding alone. inf if nothing in the backward is random.
        losses: policy → mean loss on the batches, nats; "bf16" for the plain model.
        layers: layer → facts of its tensors: shape, amax in each batch, outlier channels.
        left: policy → module → why it is not quantized.
        facts: the settings of the audit.
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
        """The faults by policy, kind, GEMM and operand, over all layers; the largest of each group first."""
        groups: dict[tuple, list[Fault]] = {}
        for fault in self.faults:
            groups.setdefault((fault.policy, fault.kind, fault.gemm, fault.what), []).append(fault)
        return list(groups.values())

    def _faults(self, policy: str) -> Iterator[Fault]:
        for row in self.rows[policy]:
            for kind, size in found_in(row):
                if kind != "noise" or row.what == "dw":
                    yield Fault(policy, row.module, row.gemm, row.what, kind, size, _text(row, kind, size))

    def to_json(self) -> dict:
        """Everything as objects for json.dumps; numbers that are not finite become None."""
        rows = {
            policy: [{**asdict(row), "spec": row.spec.key if row.spec else None} for row in rows]
            for policy, rows in self.rows.items()
        }
        faults = [asdict(fault) for fault in self.faults]
        return _finite({**vars(self), "rows": rows, "faults": faults})


def found_in(row: Row) -> Iterator[tuple[str, float]]:
    """(kind, size), as in Fault, of what is wrong with an operand or product; what is worst comes first."""
    m = row.measured
    if m.non_finite:
        yield "non-finite", m.non_finite
    if row.drifts:
        yield "drift", m.law.floor.mean
    if row.gemm != "fprop" and row.is_product and m.snr_ratio < SQRT3:
        yield "noise", m.snr_ratio
    if m.saturation > SATURATION:
        yield "saturation", m.saturation
    if m.underflow > UNDERFLOW:
        yield "underflow", m.underflow


def _text(row: Row, kind: str, size: float) -> str:
    """The finding in a sentence, and what would help."""
    blocks, law = f"{size:.1%} of the blocks of {row.what}", row.measured.law
    if kind == "non-finite":
        return f"{blocks} hold a NaN or an infinity"
    if kind == "saturation":
        return f"{blocks} lose the top of their largest element; a scale rule that rounds up would keep it"
    if kind == "underflow":
        return (
            f"{blocks} decode to zero: they are too small beside the largest; an outer scale per row, or MXFP8, would "
            "keep them"
        )
    if kind == "noise":
        return (
            f"the weight gradient is {size:.2f} times the noise of this layer's own rounding, under √3; more bits in "
            "its wgrad or a larger batch would help"
        )
    floor = f"{size:.1e} of the energy of {row.what} remains however many draws are averaged"
    if law.draws == 1:
        return f"{floor}: nothing in it is random; stochastic or MS-EDEN rounding would average out"
    return f"{floor} (err({law.draws}) fits {law.variance:.1e}/B + {size:.1e})"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
