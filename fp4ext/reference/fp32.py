"""IEEE fp32 in the order written (docs/numerics.md, preamble).

Plain eager torch operations on fp32 tensors round once each, to nearest even, and are never fused. The traps are
`number / tensor`, which torch computes as reciprocal times number, and torch.sum, whose order is its own. Use these
instead.
"""

from __future__ import annotations

import torch

FLT_MAX = torch.finfo(torch.float32).max


def f32(value) -> torch.Tensor:
    """`value` (a Python number, folded in fp64, or a tensor) rounded once to an fp32 tensor."""
    return torch.as_tensor(value, dtype=torch.float32)


def divide(a, b) -> torch.Tensor:
    """fl(a / b): a true division, rounded once. Tensors or numbers; fp32 result."""
    return torch.true_divide(f32(a), f32(b))


def at_most(x: torch.Tensor, limit: float) -> torch.Tensor:
    """min(x, limit) for fp32 x."""
    return torch.minimum(x, f32(limit))


def bits(x: torch.Tensor) -> torch.Tensor:
    """The 32 bits of fp32 x, as an int64 tensor in 0..2^32-1."""
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def from_bits(b: torch.Tensor) -> torch.Tensor:
    """The fp32 value of bits b (int64, 0..2^31-1: no sign)."""
    return b.to(torch.int32).view(torch.float32)


def sum_in_order(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis in index order from 0, one fp32 rounding a step. [..., n] -> [...]."""
    total = torch.zeros(terms.shape[:-1], dtype=torch.float32)
    for term in terms.movedim(-1, 0).contiguous():
        total = total + term
    return total


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fl(a*b + c) with one rounding, fp32 tensors (broadcast).

    The product of two fp32 has at most 48 bits and is exact in fp64. The sum with c need not be, and rounding it to
    fp64 and again to fp32 would round twice. So it is rounded to odd in fp64: where the fp64 sum is inexact (two_sum
    gives its error) and its last bit is even, the neighbour on the side of the error is taken. 53 >= 24 + 2 bits make
    the second rounding then the right one (Boldo & Melquiond 2008).
    """
    p, c = torch.broadcast_tensors(a.double() * b.double(), c.double())
    s = p + c
    c_part = s - p
    error = (p - (s - c_part)) + (c - c_part)  # two_sum: p + c = s + error exactly
    even = (s.contiguous().view(torch.int64) & 1) == 0
    toward = torch.where(error > 0, torch.inf, -torch.inf).to(torch.float64)
    wrong = even & (error != 0) & torch.isfinite(s)
    return torch.where(wrong, torch.nextafter(s, toward), s).float()
