"""The products of layers that stay unquantized, where torch's own are too slow or not row-invariant.

    y = dtype(Σ_k dtype(x) · dtype(w)),   sums in fp32, operands and result in `dtype`

- `serve_bf16`: BF16 products on a CPU without BF16 instructions, multiplied by the fp32 units. A product of two BF16
  numbers is exact in fp32, so this is what a BF16 unit computes, up to the order of the sum. torch falls back to slow
  code on such CPUs: a step of the tiny preset takes about ten times as long (AVX2, two cores).
- `serve_invariant`: sums in a fixed order (fp4ext.gemm, docs/numerics.md, 9), where torch chooses the order by shape.
  A row of logits then depends on that row alone, which the RL stages need. Pretraining does not need it and takes
  torch's products, which are faster. `dtype` is autocast's, or that of x without autocast.

The backward of both takes fp32 products of the same operands, in torch's order. Each function changes the class of the
model's plain Linears; parameters, their names and the state_dict stay.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp4ext


def native(device: torch.device) -> bool:
    """Whether torch multiplies BF16 on this device with instructions made for it."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def product(x: Tensor, w: Tensor, invariant: bool) -> Tensor:
    """x·wᵀ of two tensors of one dtype, which is that of the result."""
    if invariant:
        return fp4ext.gemm(x, w, out_dtype=x.dtype)
    return F.linear(x.float(), w.float()).to(x.dtype)


class Product(torch.autograd.Function):
    """`product` of x and w in `dtype`, with its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, dtype: torch.dtype, invariant: bool) -> Tensor:
        ctx.dtypes = x.dtype, w.dtype
        x, w = x.to(dtype), w.to(dtype)
        ctx.save_for_backward(x, w)
        return product(x, w, invariant)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, w = ctx.saved_tensors
        dy = dy.to(x.dtype).float()
        dx = (dy @ w.float()).to(x.dtype)
        dw = (dy.flatten(0, -2).T @ x.float().flatten(0, -2)).to(x.dtype)
        return dx.to(ctx.dtypes[0]), dw.to(ctx.dtypes[1]), None, None


class BF16Linear(nn.Linear):
    """nn.Linear whose product is BF16, with or without autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = Product.apply(x, self.weight, torch.bfloat16, False)
            return y if self.bias is None else y + self.bias.to(y.dtype)


class InvariantLinear(nn.Linear):
    """nn.Linear whose rows are independent of each other, bit for bit."""

    def forward(self, x: Tensor) -> Tensor:
        device, w = x.device.type, self.weight
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            recorded = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
            y = Product.apply(x, w, dtype, True) if recorded else product(x.to(dtype), w.to(dtype), True)
            return y if self.bias is None else y + self.bias.to(dtype)


def serve_bf16(model: nn.Module) -> None:
    """Give every plain nn.Linear of the model, which no policy converted, BF16 products on the fp32 units."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = BF16Linear


def serve_invariant(model: nn.Module) -> None:
    """Give every plain nn.Linear of the model, which no policy converted, row-invariant products."""
    for module in model.modules():
        if type(module) in (nn.Linear, BF16Linear):
            module.__class__ = InvariantLinear
