"""y = x·wᵀ (+ bias) in the order of summation of section 9."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..policy import formats
from .elements import _fp32
from .fp32 import fma
from .quantization import elements_of, scales_of

CHUNK = 1024
LANES = 16  # also the block of the block order


def gemm(x, w, bias=None, out_dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None) -> torch.Tensor:
    """[M, K] times [N, K] transposed -> [M, N] of out_dtype (bf16, fp16 or fp32).

    Each operand is (codes, scales, global_scale, format) as quantize gives them, or a plain bf16 / fp16 / fp32 tensor.
    bias: [N], any of the three dtypes, or None. out: fp32 [M, N] -> fp32 out + y, out itself unchanged.
    """
    x, w = _Operand(x), _Operand(w)
    k = max(x.k, w.k)
    k += -k % LANES
    x.pad(k)
    w.pad(k)
    chunk_sum = _block_order if x.is_e2m1 and w.is_e2m1 else _lane_order
    acc = torch.zeros(x.rows, w.rows)
    for start in range(0, k, CHUNK):
        part = chunk_sum(x, w, start, min(start + CHUNK, k))
        acc = part if start == 0 else acc + part
    y = (acc.double() * (x.global_scale * w.global_scale.mT)).float()
    if bias is not None:
        y = y + _fp32(bias)
    if out is not None:
        return out + y
    return y.to(out_dtype)


class _Operand:
    """Elements and scales of one operand, its global scale apart (fp64 [rows or 1, 1])."""

    def __init__(self, operand):
        self.global_scale = torch.ones(1, 1, dtype=torch.float64)
        if isinstance(operand, torch.Tensor):
            self.is_e2m1 = False
            self.elements = _fp32(operand)
            self.scales = torch.ones(*operand.shape[:-1], -(-operand.shape[-1] // LANES))
        else:
            codes, scales, global_scale, format = operand
            fmt = formats.get(format)
            self.is_e2m1 = fmt.element is formats.E2M1
            self.elements = elements_of(codes, fmt)
            self.scales = scales_of(scales, fmt).repeat_interleave(fmt.block // LANES, dim=-1)  # one for each 16
            if global_scale is not None and global_scale.numel():
                self.global_scale = global_scale.double().reshape(-1, 1)
        self.rows, self.k = self.elements.shape

    def pad(self, k: int):
        """Zeros up to k elements, with scale 0 where a 16 has none."""
        self.elements = F.pad(self.elements, (0, k - self.k))
        self.scales = F.pad(self.scales, (0, k // LANES - self.scales.shape[-1]))

    def values(self) -> torch.Tensor:
        """element·float(s): exact in fp32."""
        return self.elements * self.scales.repeat_interleave(LANES, dim=-1)


def _block_order(x: _Operand, w: _Operand, start: int, stop: int) -> torch.Tensor:
    """acc = fma(I, fl(s_x·s_w), acc) for each 16 in order; I = the exact sum of products of elements, an integer /
    4."""
    acc = torch.zeros(x.rows, w.rows)
    twice_x, twice_w = (2 * x.elements).to(torch.int64), (2 * w.elements).to(torch.int64)
    for k in range(start, stop, LANES):
        quarters = twice_x[:, k : k + LANES] @ twice_w[:, k : k + LANES].T  # int64: exact in any order
        scale = x.scales[:, k // LANES, None] * w.scales[None, :, k // LANES]
        acc = fma(quarters.float() / 4, scale, acc)
    return acc


def _lane_order(x: _Operand, w: _Operand, start: int, stop: int) -> torch.Tensor:
    """Sixteen sums side by side, lane l over k ≡ l mod 16, then halved: 8, 4, 2, 1."""
    lanes = torch.zeros(x.rows, w.rows, LANES)
    x_values, w_values = x.values(), w.values()
    for k in range(start, stop, LANES):
        lanes = fma(x_values[:, None, k : k + LANES], w_values[None, :, k : k + LANES], lanes)
    for h in (8, 4, 2, 1):
        lanes = lanes[..., :h] + lanes[..., h : 2 * h]
    return lanes[..., 0]
