"""The numerics contract (docs/numerics.md) in plain PyTorch: slow, clear, imported only by tests.

    fp32.py         bits, division, sums in order, a true fma
    elements.py     E2M1, E4M3, E5M2, E8M0: encode, decode, stochastic encode, packing      section 1, 5
    philox.py       Philox4x32-10 and the coordinates that feed it                          section 5
    hadamard.py     signs, the transform, its inverse, the length used for a K              section 6
    block_scale.py  outer scales and the rules that choose a block's scale                  sections 2, 3
    quantize.py     quantize, dequantize, amax_of                                           sections 2-7
    gemm.py         the GEMM in its lawful order of summation                               section 9
    attention.py    causal attention in its lawful order, and its exponential               section 11
    grouped.py      experts: each on its own                                                section 9
    layout.py       the 128x4 scale layout of the tensor cores                              section 10

It is written from docs/numerics.md alone, without sight of the C++ that must agree with it.
"""

from .block_scale import e8m0_scales, nvfp4_scales, outer_scales
from .elements import (
    decode_e2m1,
    decode_e4m3,
    decode_e5m2,
    decode_e8m0,
    encode_e2m1,
    encode_e2m1_stochastic,
    encode_e4m3,
    encode_e4m3_stochastic,
    encode_e5m2,
    encode_e5m2_stochastic,
    pack_nibbles,
    unpack_nibbles,
)
from .gemms import gemm
from .grouped import grouped_gemm, grouped_quantize
from .hadamard import effective_n, inverse_rht, rht, signs
from .invariant_attention import attention, exp2
from .layout import swizzle, unswizzle
from .philox import element_bits, philox4x32
from .quantization import amax_of, dequantize, quantize

__all__ = [
    "amax_of",
    "attention",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e5m2",
    "decode_e8m0",
    "dequantize",
    "e8m0_scales",
    "effective_n",
    "element_bits",
    "encode_e2m1",
    "encode_e2m1_stochastic",
    "encode_e4m3",
    "encode_e4m3_stochastic",
    "encode_e5m2",
    "encode_e5m2_stochastic",
    "exp2",
    "gemm",
    "grouped_gemm",
    "grouped_quantize",
    "inverse_rht",
    "nvfp4_scales",
    "outer_scales",
    "pack_nibbles",
    "philox4x32",
    "quantize",
    "rht",
    "signs",
    "swizzle",
    "unpack_nibbles",
    "unswizzle",
]
