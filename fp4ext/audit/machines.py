"""Machines, as data: what a chip can do at most, by its vendor's data sheet; dense, not sparse, figures.

The last machine, `here`, is measured on the spot (calibrate.py).
"""

from __future__ import annotations

from dataclasses import dataclass


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


WIDER = {
    "nvfp4": ("nvfp4", "mxfp8", "bf16"),
    "mxfp4": ("nvfp4", "mxfp8", "bf16"),
    "mxfp8": ("mxfp8", "bf16"),
    "mxfp8_e5m2": ("mxfp8", "bf16"),
    "bf16": ("bf16",),
}
P, T, G = 1e15, 1e12, 1e9

# vector: SMs · 128 lanes · boost clock.
MACHINES = {
    m.name: m
    for m in (
        Machine(
            "gb300",
            {"nvfp4": 15 * P, "mxfp8": 5 * P, "bf16": 2.5 * P},
            bandwidth=8 * T,
            memory=288 * G,
            link=100 * G,
            vector=160 * 128 * 1.9 * G,
            note="Blackwell Ultra data sheet; the link is one 800 Gb/s port a GPU, between racks",
        ),
        Machine(
            "b200",
            {"nvfp4": 9 * P, "mxfp8": 4.5 * P, "bf16": 2.25 * P},
            bandwidth=7.7 * T,
            memory=180 * G,
            link=50 * G,
            vector=148 * 128 * 1.85 * G,
            note="Blackwell data sheet (HGX); the link is one 400 Gb/s port a GPU",
        ),
        Machine(
            "h200",
            {"bf16": 0.989 * P},
            bandwidth=4.8 * T,
            memory=141 * G,
            link=50 * G,
            vector=132 * 128 * 1.98 * G,
            note="Hopper data sheet; no block-scaled products: 4-bit and MXFP8 operands are multiplied in BF16",
        ),
        Machine(
            "rtx5090",
            {"nvfp4": 1.676 * P, "mxfp8": 0.419 * P, "bf16": 0.2095 * P},
            bandwidth=1.792 * T,
            memory=32 * G,
            link=32 * G,
            vector=170 * 128 * 2.41 * G,
            note="Blackwell RTX data sheet, fp32 accumulation; the link is PCIe 5 ×16, half of it usable",
        ),
    )
}


def get(name: str) -> Machine:
    """The machine of that name. Raises ValueError, listing the names there are."""
    if name not in MACHINES:
        raise ValueError(f"unknown machine {name!r}; accepted: {', '.join([*MACHINES, 'here'])}")
    return MACHINES[name]
