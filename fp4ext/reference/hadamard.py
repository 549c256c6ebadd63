"""The random Hadamard transform along the contraction (section 6).

A stage is r = H·D·x / √n for each vector of n: D random signs, H Sylvester's matrix, run as butterflies in a fixed
order. In the second stage the first butterfly turns pair j by 20 + 6·(j mod 8) degrees instead of 45.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .philox import Rng, philox4x32, usage


def parse(name: str) -> tuple[int, int]:
    """ "128x2" -> (128, 2); "64" -> (64, 1)."""
    n, _, stages = name.partition("x")
    return int(n), int(stages or 1)


def effective_n(n: int, k: int) -> int:
    """The length used for a contraction of k: n, halved until it divides k rounded up to 16s. Section 6."""
    k = -(-k // 16) * 16
    while n > 16 and k % n:
        n //= 2
    return n


def signs(rng, n: int, stages: int) -> torch.Tensor:
    """bool [stages, n], True = negate: bit i%32 of word i/32 of call (stage, 0, 2, offset). Section 6."""
    rng = Rng.of(rng)
    words = philox4x32((torch.arange(stages), 0, usage("sign"), rng.offset), rng.seed)
    i = torch.arange(n)
    return (torch.stack(words, dim=-1)[:, i // 32] >> (i % 32)) & 1 == 1


def rht(x: torch.Tensor, n: int, stages: int, rng) -> torch.Tensor:
    """fp32 [..., K] -> fp32 [..., K up to a multiple of 16], rotated in vectors of effective_n(n, K). Section 6, 4.

    A vector that holds, or comes to hold, a non-finite value becomes NaN as a whole.
    """
    k = x.shape[-1]
    n = effective_n(n, k)
    v = F.pad(x.to(torch.float32), (0, -k % 16)).unflatten(-1, (-1, n))
    for stage, negate in enumerate(signs(rng, n, stages)):
        v = torch.where(negate, -v, v)
        v = _scaled(_butterflies(_first(v, turned=stage == 1)))
    finite = torch.isfinite(v).all(dim=-1, keepdim=True)
    return torch.where(finite, v, torch.nan).flatten(-2)


def inverse_rht(r: torch.Tensor, n: int, stages: int, rng) -> torch.Tensor:
    """Undoes rht: each butterfly is its own inverse. [..., K] of any float dtype, K a multiple of the effective n.

    No GEMM needs it (the transform cancels there); tests measure with it, in fp64.
    """
    v = r.unflatten(-1, (-1, n))
    for stage, negate in reversed(list(enumerate(signs(rng, n, stages)))):
        v = _scaled(_first(_butterflies(v), turned=stage == 1))
        v = torch.where(negate, -v, v)
    return v.flatten(-2)


def _first(v: torch.Tensor, turned: bool) -> torch.Tensor:
    """The butterfly of h = 1: (a, b) -> (a + b, a - b), or turned, (c·a + s·b, s·a - c·b) with c, s = √2·(cos, sin)."""
    a, b = v[..., 0::2], v[..., 1::2]
    if not turned:
        return torch.stack((a + b, a - b), dim=-1).flatten(-2)
    angle = torch.deg2rad(20 + 6 * (torch.arange(a.shape[-1], dtype=torch.float64) % 8))
    c, s = (math.sqrt(2) * angle.cos()).to(v.dtype), (math.sqrt(2) * angle.sin()).to(v.dtype)
    return torch.stack((c * a + s * b, s * a - c * b), dim=-1).flatten(-2)


def _butterflies(v: torch.Tensor) -> torch.Tensor:
    """The butterflies of h = 2, 4 ... n/2 over the last axis: (a, b) -> (a + b, a - b). [..., n] -> [..., n]."""
    n = v.shape[-1]
    h = 2
    while h < n:
        # [.., 0, i] has bit h clear, [.., 1, i] is its partner i + h
        pairs = v.reshape(*v.shape[:-1], n // (2 * h), 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = torch.stack((a + b, a - b), dim=-2).reshape(v.shape)
        h *= 2
    return v


def _scaled(v: torch.Tensor) -> torch.Tensor:
    """Times fl(1/√n)."""
    return v * torch.tensor(1 / math.sqrt(v.shape[-1]), dtype=v.dtype)
