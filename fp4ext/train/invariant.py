"""Plain products of fixed order, for the layers that stay unquantized: torch's own order its sums by shape.

    y = bf16(Σ_k bf16(x) · bf16(w)) under autocast, in fp32 without;   fp4ext.gemm, docs/numerics.md, 9

A row of logits then depends on that row alone, which the RL stages need and pretraining does not: there torch's
products stay, which are faster. The backward is in fp32 products of the same operands, in torch's order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fp4ext

from . import bf16


def product(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """x·wᵀ, operands and result in `dtype`."""
    return fp4ext.gemm(x.to(dtype), w.to(dtype), out_dtype=dtype)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtypes = x.dtype, w.dtype
        x, w = x.to(dtype), w.to(dtype)
        ctx.save_for_backward(x, w)
        return product(x, w, dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, w = ctx.saved_tensors
        dy = dy.to(x.dtype).float()
        dx = (dy @ w.float()).to(x.dtype)
        dw = (dy.flatten(0, -2).T @ x.float().flatten(0, -2)).to(x.dtype)
        return dx.to(ctx.dtypes[0]), dw.to(ctx.dtypes[1]), None


def multiply(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """The product, recorded where a gradient is wanted."""
    recorded = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    return Product.apply(x, w, dtype) if recorded else product(x, w, dtype)


class Linear(nn.Linear):
    """nn.Linear whose rows are independent of each other, bit for bit."""

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            y = multiply(x, self.weight, dtype)
            return y if self.bias is None else y + self.bias.to(dtype)


def serve(model: nn.Module) -> None:
    """Let every plain nn.Linear of the model (those that no policy converted) multiply as above."""
    for module in model.modules():
        if type(module) in (nn.Linear, bf16.Linear):
            module.__class__ = Linear
