"""The transpose of a QTensor whose blocks are 16×16 tiles: the same codes and scales in another order, no rounding."""

from __future__ import annotations

import torch

from ..errors import Refused
from .qtensor import QTensor

_TILE = 16


def transposed(q: QTensor) -> QTensor:
    """q.mT, quantized along its own last axis, where the blocks of q are 16×16 tiles.

    Args:
        q: NVFP4, [N, K], made with block="16x16"; N and K multiples of 16; one outer scale.

    Returns:
        [K, N], what quantize(x, …, block="16x16", axis=-2) gives where q is quantize(x, …, block="16x16").

    Raises:
        Refused: another shape, another format, an outer scale per row. That scales are those of tiles is not checked.
    """
    if q.format.name != "nvfp4" or len(q.shape) != 2 or any(n % _TILE for n in q.shape):
        raise Refused(f"q is {q}; accepted: nvfp4 [N, K], multiples of 16, in 16×16 tiles")
    if q.global_scale is not None and q.global_scale.dim():
        raise Refused("q has an outer scale per row; accepted: one outer scale")
    n, k = q.shape
    codes = q.codes.view(torch.uint8)
    elements = torch.stack((codes & 15, codes >> 4), dim=-1).view(n, k).mT.reshape(k, n // 2, 2)
    scales = q.scales.view(torch.uint8)[::_TILE].mT.repeat_interleave(_TILE, 0).contiguous()
    packed = elements[..., 0] | elements[..., 1] << 4
    shape = torch.Size((k, n))
    return QTensor(packed.view(q.codes.dtype), scales.view(q.scales.dtype), q.global_scale, q.format, shape, q.dtype)
