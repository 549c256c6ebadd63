"""BF16 products on a CPU without BF16 instructions: autocast's operands and roundings, multiplied by the fp32 units.

    y = bf16(Σ_k bf16(x) · bf16(w)),   sums in fp32

A product of two BF16 numbers is exact in fp32, so this is what a BF16 unit computes, up to the order of the sum.
torch's own BF16 products fall back to slow code on such CPUs: a step of the tiny preset takes about ten times as long
(AVX2, two cores). `serve(model)` gives the model's plain Linears this product; parameters, names and state_dict stay.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def native(device: torch.device) -> bool:
    """Whether torch multiplies BF16 on this device with instructions made for it."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        x16, w16 = x.bfloat16(), w.bfloat16()
        ctx.save_for_backward(x16, w16)
        ctx.dtypes = x.dtype, w.dtype
        return F.linear(x16.float(), w16.float()).bfloat16()

    @staticmethod
    def backward(ctx, dy: Tensor):
        x16, w16 = ctx.saved_tensors
        dy = dy.bfloat16().float()
        dx = (dy @ w16.float()).bfloat16()
        dw = (dy.flatten(0, -2).T @ x16.float().flatten(0, -2)).bfloat16()
        return dx.to(ctx.dtypes[0]), dw.to(ctx.dtypes[1])


class Linear(nn.Linear):
    """nn.Linear whose product is BF16, with or without autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = Product.apply(x, self.weight)
            return y if self.bias is None else y + self.bias.to(y.dtype)


def serve(model: nn.Module) -> None:
    """Let every plain nn.Linear of the model (those that no policy converted) multiply as above."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
