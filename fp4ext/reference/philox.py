"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) and the coordinates that feed it (section 5).

Every random number is a function of the seed and of where its element stands: no state, no order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
PURPOSES = {"element": 0, "scale": 1, "sign": 2}
ROLES = {"x": 0, "w": 1, "dy": 2}


def philox4x32(counter, seed: int):
    """Ten rounds. counter: four int64 tensors or ints (modulo 2^32, broadcast); seed: 64 bits, the low word is key 0.

    Returns four int64 tensors of the broadcast shape, each 0..2^32-1.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*(torch.as_tensor(c, dtype=torch.int64) & MASK for c in counter))
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(10):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def _multiply(m: int, c: torch.Tensor):
    """High and low 32 bits of the product; int64 wraps modulo 2^64, and the mask drops what >> drew from the sign."""
    p = c * m
    return (p >> 32) & MASK, p & MASK


@dataclass(frozen=True)
class Rng:
    """An rng tensor, read: int64 {seed, offset} or {seed, offset, row, k}; (row, k) are a shard's first coordinates."""

    seed: int
    offset: int
    row: int = 0
    k: int = 0

    @classmethod
    def of(cls, rng: torch.Tensor | Rng | None) -> Rng:
        if isinstance(rng, Rng):
            return rng
        if rng is None:
            raise ValueError(
                "this spec draws random bits and needs rng = int64 tensor {seed, offset} or {seed, offset, row, k}"
            )
        if rng.dtype != torch.int64 or rng.numel() not in (2, 4):
            raise ValueError(f"rng must be int64 with 2 or 4 elements, got {rng.dtype} with {rng.numel()}")
        return cls(*rng.flatten().tolist())


def usage(purpose: str, direction: int = 0, role: int = 0) -> int:
    """purpose + 4*direction + 8*role; direction 0 = row-wise (axis -1), 1 = column-wise (axis -2). Section 5."""
    return PURPOSES[purpose] + 4 * direction + 8 * role


def element_bits(rng, rows: int, k: int, use: int) -> torch.Tensor:
    """16 random bits for each element of a quantized view: int64 [rows, k], k a multiple of 8. Section 5.

    One call serves elements 8j..8j+7 of a row: element i takes word i/2, the low half if i is even, else the high.
    """
    rng = Rng.of(rng)
    row = rng.row + torch.arange(rows)[:, None]
    eighth = rng.k // 8 + torch.arange(k // 8)[None, :]
    words = philox4x32((eighth, row, use, rng.offset), rng.seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=-1).reshape(rows, k)


def block_bits(rng, rows: int, k: int, block: int, use: int) -> torch.Tensor:
    """16 random bits for each block: its first element's (low half of word 0). int64 [rows, k/block]. Section 7."""
    rng = Rng.of(rng)
    row = rng.row + torch.arange(rows)[:, None]
    eighth = (rng.k + block * torch.arange(k // block)[None, :]) // 8
    return philox4x32((eighth, row, use, rng.offset), rng.seed)[0] & 0xFFFF
