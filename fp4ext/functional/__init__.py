"""Quantizers, GEMMs and attention on tensors. The layers of fp4ext.nn are built from them.

Only ops.py calls torch.ops.fp4ext. The other files check the arguments of the public functions and call ops.py.
"""

from .availability import backends
from .gemms import gemm
from .grouped import grouped_gemm, grouped_quantize
from .invariant_attention import attention
from .ops import set_draw_rank
from .qtensor import QTensor, Ragged
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
