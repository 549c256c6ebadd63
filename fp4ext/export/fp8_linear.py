"""A linear layer whose weight stays in FP8, and is dequantized when it is used."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import Refused
from ..nn.layer_ops import by_autocast
from .fp8 import Fp8


class Fp8Linear(nn.Module):
    """y = x·ŵᵀ + bias, w an Fp8: weight-only, the product in x's dtype. For inference: no gradient flows to w.

    Its codes and scales are buffers of whole numbers, so that Module.to(dtype) and half() leave them.

    Args:
        weight: [N, K].
        bias: [N] or None.

    Input [.., K] in fp32, bf16 or fp16; output [.., N] in the same dtype, or autocast's.

    Raises:
        TypeError: the weight is not an Fp8.
        Refused: the weight is not a matrix.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: Fp8, bias: Tensor | None = None):
        super().__init__()
        if not isinstance(weight, Fp8):
            raise TypeError(f"weight is {type(weight).__name__}; accepted: an Fp8")
        if len(weight.shape) != 2:
            raise Refused(f"weight has shape {tuple(weight.shape)}; accepted: [N, K]")
        self.out_features, self.in_features = weight.shape
        self.block, self.weight_dtype, self.names = weight.block, weight.dtype, dict(weight.names)
        self._kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for part in ("codes", "scale", "input_scale"):
            t = getattr(weight, part)
            if t is not None:
                self._kinds[part] = t.dtype, tuple(t.shape)
            self.register_buffer(part, None if t is None else t.contiguous().reshape(-1).view(torch.uint8))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @property
    def weight(self) -> Fp8:
        """The weight, over the buffers' memory."""
        parts: dict[str, Tensor] = {
            part: getattr(self, part).view(dtype).view(shape) for part, (dtype, shape) in self._kinds.items()
        }
        inputs = parts.get("input_scale")
        return Fp8(parts["codes"], parts["scale"], self.block, self.weight_dtype, inputs, self.names)

    def forward(self, x: Tensor) -> Tensor:
        x = by_autocast(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.dequantize(x.dtype), bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.weight.kind}"
