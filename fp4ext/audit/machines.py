"""Machines, as data: what a chip can do at most, by its vendor's data sheet; dense, not sparse, figures.

The last machine, `here`, is measured on the spot (calibrate.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Refused


@dataclass(frozen=True)
class Machine:
    """One accelerator, and the share of a network that it has.

    Attributes:
        name: as `--machine` takes it.
        flops: format → FLOP/s of a matrix product of it; a format that is missing is widened to the next that is there.
        bandwidth: of its memory, B/s; memory: its size, B.
        link: B/s that one chip sends to others while it shards, in one direction.
        vector: fp32 operations a second outside the tensor cores (lanes · clock), which quantizers live on.
        note: where the figures come from.
    """

    name: str
    flops: dict[str, float]
    bandwidth: float
    memory: float
    link: float
    vector: float
    note: str

    def rate(self, *formats: str) -> float:
        """FLOP/s of a product of operands of these formats: that of the widest."""
        return min(self._rate(f) for f in formats)

    def _rate(self, fmt: str) -> float:
        for wider in WIDER[fmt]:
            if wider in self.flops:
                return self.flops[wider]
        raise KeyError(fmt)


_MX8 = ("mxfp8", "bf16")
_FP4 = ("nvfp4", *_MX8)
WIDER = {"nvfp4": _FP4, "mxfp4": _FP4, "mxfp8": _MX8, "mxfp8_e5m2": _MX8, "bf16": ("bf16",)}
P, T, G = 1e15, 1e12, 1e9

# name: (PFLOP/s of nvfp4, mxfp8, bf16), (TB/s, GB) of memory, GB/s of the link, (SMs, GHz at boost), source.
_SHEETS = {
    "gb300": (
        {"nvfp4": 15, "mxfp8": 5, "bf16": 2.5},
        (8, 288),
        100,
        (160, 1.9),
        "Blackwell Ultra data sheet; the link is one 800 Gb/s port a GPU, between racks",
    ),
    "b200": (
        {"nvfp4": 9, "mxfp8": 4.5, "bf16": 2.25},
        (7.7, 180),
        50,
        (148, 1.85),
        "Blackwell data sheet (HGX); the link is one 400 Gb/s port a GPU",
    ),
    "h200": (
        {"bf16": 0.989},
        (4.8, 141),
        50,
        (132, 1.98),
        "Hopper data sheet; no block-scaled products: 4-bit and MXFP8 operands are multiplied in BF16",
    ),
    "rtx5090": (
        {"nvfp4": 1.676, "mxfp8": 0.419, "bf16": 0.2095},
        (1.792, 32),
        32,
        (170, 2.41),
        "Blackwell RTX data sheet, fp32 accumulation; the link is PCIe 5 ×16, half of it usable",
    ),
}
LANES = 128  # fp32 lanes of an SM
MACHINES = {
    name: Machine(
        name,
        {fmt: rate * P for fmt, rate in rates.items()},
        bandwidth=memory[0] * T,
        memory=memory[1] * G,
        link=link * G,
        vector=chip[0] * LANES * chip[1] * G,
        note=note,
    )
    for name, (rates, memory, link, chip, note) in _SHEETS.items()
}


def get(name: str) -> Machine:
    """The machine of that name. Raises Refused, listing the names there are."""
    if name not in MACHINES:
        raise Refused(f"unknown machine {name!r}; accepted: {', '.join([*MACHINES, 'here'])}")
    return MACHINES[name]
