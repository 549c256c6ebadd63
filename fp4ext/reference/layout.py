"""The 128x4 layout of block scales that tensor cores read (docs/numerics.md, 10).

It tells where each scale goes, one at a time; kernels do the same in whole vectors.
"""

from __future__ import annotations

import torch


def offsets(rows: int, blocks: int) -> torch.Tensor:
    """int64 [rows, blocks]: the place of scale (i, j) in the swizzled bytes."""
    i, j = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    tiles = -(-blocks // 4)
    return ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4


def swizzled_size(rows: int, blocks: int) -> int:
    """Bytes: rows up to a multiple of 128 times block columns up to a multiple of 4."""
    return (-(-rows // 128) * 128) * (-(-blocks // 4) * 4)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """[.., rows, blocks] one-byte scales -> [.., swizzled_size], same dtype; zero padding, each matrix on its own."""
    *stack, rows, blocks = scales.shape
    flat = torch.zeros(*stack, swizzled_size(rows, blocks), dtype=torch.uint8)
    flat[..., offsets(rows, blocks).flatten()] = scales.contiguous().view(torch.uint8).flatten(-2)
    return flat.view(scales.dtype)


def unswizzle(flat: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The inverse: [.., swizzled_size] -> [.., rows, blocks], same dtype."""
    picked = flat.view(torch.uint8)[..., offsets(rows, blocks).flatten()]
    return picked.unflatten(-1, (rows, blocks)).view(flat.dtype)
