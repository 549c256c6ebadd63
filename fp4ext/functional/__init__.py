"""Quantizers, GEMMs and attention on tensors, without modules: what the layers of fp4ext.nn are made of.

ops.py is the one door to torch.ops.fp4ext; each other file checks its arguments and calls it.
"""

from .availability import backends
from .gemms import gemm
from .grouped import Ragged, grouped_gemm, grouped_quantize
from .invariant_attention import attention
from .ops import set_draw_rank
from .qtensor import QTensor
from .quantization import quantize

__all__ = [
    "QTensor",
    "Ragged",
    "attention",
    "backends",
    "gemm",
    "grouped_gemm",
    "grouped_quantize",
    "quantize",
    "set_draw_rank",
]
