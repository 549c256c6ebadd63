"""Causal attention in the order of section 11."""

from __future__ import annotations

import math

import torch

from .fp32 import bits, divide, f32, fma, from_bits

CHUNK = 256  # keys whose weighted values are summed before they join the total
LANES = 16
LEAST = -126.0  # exp2 of anything less counts as 0
# 2^f = 1 + c1·f + … + c6·f^6 on [-1/2, 1/2], to 1.6e-8
COEFFICIENTS = tuple(
    float.fromhex(c)
    for c in (
        "0x1.62e43p-1",
        "0x1.ebfbdcp-3",
        "0x1.c6aee8p-5",
        "0x1.3b2d4cp-7",
        "0x1.5f3e54p-10",
        "0x1.41fbbcp-13",
    )
)
ROUND = 1.5 * 2.0**23  # adding it leaves the nearest integer in the low bits


def exp2(t: torch.Tensor) -> torch.Tensor:
    """2^t for t ≤ 0 (fp32), 0 below -126, NaN for NaN."""
    shifted = t + ROUND
    f = t - (shifted - ROUND)
    p = f32(COEFFICIENTS[-1]).expand(t.shape)
    for c in COEFFICIENTS[-2::-1]:
        p = p * f + f32(c)
    p = p * f + 1.0
    power = from_bits((bits(shifted) + 127) << 23 & 0x7F800000)
    return torch.where(t >= LEAST, p * power, torch.where(t.isnan(), t, torch.zeros_like(t)))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor:
    """q [B, H, M, D], k and v [B, G, T, D] with G dividing H -> [B, H, M, D] in the dtype of q.

    start: int64 [B]; row i of sequence b reads keys 0 … start[b] + i. None: the rows are the last M of T.
    scale: of the products; None: 1/√D.
    """
    batch, heads, m, d = q.shape
    groups, t = k.shape[1:3]
    start = torch.full((batch,), t - m) if start is None else start
    factor = f32((d**-0.5 if scale is None else scale) * math.log2(math.e))
    y = torch.empty(q.shape)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            for i in range(m):
                n = int(start[b]) + i + 1
                y[b, h, i] = _row(q[b, h, i].float(), k[b, g, :n].float(), v[b, g, :n].float(), factor)
    return y.to(q.dtype)


def _row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """One query over its n keys: [D], [n, D], [n, D] -> [D]."""
    n = len(k)
    scores = torch.zeros(n)
    for q_d, k_d in zip(q, k.T, strict=True):
        scores = fma(q_d.expand(n), k_d, scores)
    scores = scores * factor
    largest = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).max()  # a NaN does not count
    weights = exp2(scores - largest)
    total, weight = torch.zeros(len(q)), torch.zeros(())
    for begin in range(0, n, CHUNK):
        part, lanes = torch.zeros(len(q)), torch.zeros(LANES)
        for j in range(begin, min(begin + CHUNK, n)):
            part = fma(weights[j].expand(len(q)), v[j], part)
            lanes[j % LANES] += weights[j]
        for half in (8, 4, 2, 1):
            lanes = lanes[:half] + lanes[half : 2 * half]
        total = part if begin == 0 else total + part
        weight = lanes[0] if begin == 0 else weight + lanes[0]
    return divide(total, weight)
