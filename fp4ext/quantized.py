"""A linear layer whose weight stays packed: what a sampler holds in memory.

y [.., N] = gemm(Q(x), ŵ) + bias        4.5 bits a weight in NVFP4, no copy in a wider type
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import policies
from .gemm import gemm
from .policy import Policy
from .qtensor import QTensor
from .quantize import quantize
from .spec import Spec


class QuantizedLinear(nn.Module):
    """y = x·ŵᵀ + bias, w a QTensor. For inference: no gradient flows.

    Its codes and scales are buffers, so `.to(device)` and state_dict carry them; a dtype given to `.to` leaves them.

    Args:
        weight: [N, K], any format.
        bias: [N] or None.
        x: how the input is quantized: a Spec; None leaves it as it is (weight-only).

    Input [.., K] in fp32, bf16 or fp16; output [.., N] in the same dtype, or autocast's.

    Raises:
        ValueError: a weight that is no matrix, or a bias that does not fit. TypeError: a weight that is no QTensor.
    """

    def __init__(self, weight: QTensor, bias: Tensor | None = None, x: Spec | None = None):
        super().__init__()
        if not isinstance(weight, QTensor):
            raise TypeError(f"weight is {type(weight).__name__}; accepted: a QTensor")
        if len(weight.shape) != 2:
            raise ValueError(f"weight has shape {tuple(weight.shape)}; accepted: [N, K]")
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; accepted: ({weight.shape[0]},)")
        self.out_features, self.in_features = weight.shape
        self.format, self.weight_dtype, self.x = weight.format, weight.dtype, x
        # Bytes, so that Module.to(dtype) and half() find no float to convert.
        self.register_buffer("codes", weight.codes.view(torch.uint8))
        self.register_buffer("scales", weight.scales.view(torch.uint8))
        outer = weight.global_scale
        self.register_buffer("global_scale", None if outer is None else outer.contiguous().view(torch.int32))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @classmethod
    def of(cls, weight: QTensor, bias: Tensor | None, policy: Policy | str, name: str = "") -> QuantizedLinear:
        """One that quantizes its input as the policy's sampler does, if into the weight's format; else weight-only."""
        x = policies.get(policy).recipe("rl_sampler", name).fprop.x
        return cls(weight, bias, x if x is not None and x.fmt is weight.format else None)

    @property
    def weight(self) -> QTensor:
        """The weight, over the buffers' memory."""
        outer = None if self.global_scale is None else self.global_scale.view(torch.float32)
        codes, scales = self.codes.view(self.format.codes_dtype), self.scales.view(self.format.scale_dtype)
        shape = torch.Size((self.out_features, self.in_features))
        return QTensor(codes, scales, outer, self.format, shape, self.weight_dtype)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
        operand = rows if self.x is None else quantize(rows, self.x)
        out = torch.float32 if x.dtype == torch.float16 else x.dtype
        return gemm(operand, self.weight, self.bias, out).to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        bits = f"{self.weight.bits_per_element:.2f} bits a weight"
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.format}, {bits}, x={self.x}"
        )
