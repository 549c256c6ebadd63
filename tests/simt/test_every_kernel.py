"""Every kernel once, small and ragged: what `make test-simt-sanitized` runs under AddressSanitizer and UBSan.

Edges are what sanitizers are for: sizes that fill no tile, addresses that are aligned to nothing, shared memory and
outputs of exactly the size asked for. The values are held by the other files, and here as far as it is cheap.
"""

import pytest
import torch

from fp4ext.testing import assert_bytes_equal, assert_same_quantized, generate

from . import test_attention, test_gemm, test_gemm_lanes
from .operands import operand
from .test_experts import check as experts_check
from .test_experts import test_swizzle as swizzle_of_experts
from .test_quantize import KEYS, RNG, SHARD, check, full


@pytest.fixture(params=["late", "early"])
def simt(_machine, request):
    _machine.configure(seed=3, asynchronous=request.param)
    return _machine


@pytest.mark.parametrize("key", KEYS)
def test_quantize(simt, key):
    storage = generate("nonfinite", 19 * 37 + 1, seed=1, dtype=torch.bfloat16)
    check(simt, storage[1:].view(19, 37), key, -1, rng=SHARD)
    x = generate("gaussian", 2, 19, 40, seed=2)
    got, wanted = (ops.quantize_rowcol(x, key, key, RNG, SHARD, 1) for ops in (simt.ops, torch.ops.fp4ext))
    assert_same_quantized(got[:3], wanted[:3], f"{key} rows")
    assert_same_quantized(got[3:], wanted[3:], f"{key} columns")


@pytest.mark.parametrize("key", [KEYS[3], KEYS[5], KEYS[7]])
def test_experts(simt, key):
    x = generate("gaussian", 41, 35, seed=3)
    for axis in (-1, -2):
        experts_check(simt, x, [5, 5, 38], key, axis)


def test_stored(simt):
    x = generate("student_t3", 21, 50, seed=4)
    for format in ("nvfp4", "mxfp8", "mxfp8_e5m2", "mxfp4"):
        q = torch.ops.fp4ext.quantize(x, *full(format), -1, None, 0, None)
        args = *q, format, 50, "bfloat16"
        assert_bytes_equal(simt.ops.dequantize(*args), torch.ops.fp4ext.dequantize(*args), format)
        args = *q, format, 50, *full("nvfp4/sweep"), -2, RNG, 1
        assert_same_quantized(simt.ops.requantize(*args), torch.ops.fp4ext.requantize(*args), format)


def test_swizzle(simt):
    scales = torch.arange(2 * 33 * 7).to(torch.uint8).view(2, 33, 7)
    swizzled = simt.ops.swizzle(scales)
    assert_bytes_equal(swizzled, torch.ops.fp4ext.swizzle(scales), "swizzle")
    assert_bytes_equal(simt.ops.unswizzle(swizzled, 33, 7), scales, "unswizzle")
    swizzle_of_experts(simt, [0, 3, 131])


@pytest.mark.parametrize("x_format, w_format", [("nvfp4", "nvfp4"), ("mxfp8", "nvfp4"), ("bf16", "mxfp8_e5m2")])
def test_gemm_invariant(simt, x_format, w_format):
    x, w = operand(x_format, 5, 80, seed=1), operand(w_format, 7, 80, seed=2)
    test_gemm.check_bound(test_gemm.gemm(simt, "invariant", x, w, torch.zeros(7)), x, w)
    test_gemm.test_over_tokens(simt, x_format, w_format, [0, 16, 17])
    test_gemm.test_added_to_y(simt, "invariant", (x_format, w_format))


@pytest.mark.parametrize("x_format, w_format", [("fp32", "fp32"), ("fp16", "nvfp4"), ("mxfp8", "fp32")])
def test_lanes(simt, x_format, w_format):
    for m, n, k in ((1, 1, 1), (17, 70, 85), (5, 9, 1050)):
        x, w = operand(x_format, m, k, seed=1), operand(w_format, n, k, seed=2)
        test_gemm_lanes.check(simt, x, w, torch.zeros(n))
        test_gemm_lanes.check(simt, test_gemm_lanes.unaligned(x), test_gemm_lanes.unaligned(w), None, "bfloat16")
    test_gemm_lanes.test_grouped(simt, x_format, w_format, [0, 3, 3, 36], False)
    test_gemm_lanes.test_over_tokens(simt, x_format, w_format, [0, 16, 17])


def test_gemm_decode(simt):
    for x_format, m in (("nvfp4", 3), ("bf16", 9)):
        x, w = operand(x_format, m, 1152, seed=1), operand("nvfp4", 19, 1152, seed=2)
        test_gemm.check_bound(test_gemm.gemm(simt, "decode", x, w), x, w)


@pytest.mark.parametrize("kernel", ["invariant", "decode"])
def test_gemm_grouped(simt, kernel):
    test_gemm.test_grouped(simt, [0, 3, 3, 6], kernel)


def test_gemm_finish(simt, device):
    device(90)
    x, w = operand("nvfp4", 5, 80, seed=1, outer="row"), operand("mxfp8", 7, 80, seed=2)
    y = simt.ops.gemm(*x.parts, *w.parts, torch.zeros(7), "float32", "fast", "fast")
    test_gemm.check_bound(y, x, w, "toward_zero")


@pytest.mark.parametrize("kernel", ["sm120", "sm100", "sm100_pairs"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_gemm_native(simt, kernel, format):
    x, w = operand(format, 6, 640, seed=1), operand(format, 4, 9, 640, seed=2)
    y = test_gemm.gemm(simt, kernel, x, w, None, torch.tensor([2, 3, 4, 5], dtype=torch.int32))
    for e, rows in enumerate((slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5))):
        test_gemm.check_bound(y[rows], x[rows], w[e], native=format)
    assert not y[5:].any()


@pytest.mark.parametrize("m, t, d", [(1, 260, 5), (34, 35, 33)], ids=str)
def test_attention_rows(simt, m, t, d):
    test_attention.check(simt, *test_attention.qkv(1, 2, 1, m, t, d, dtype=torch.bfloat16), torch.tensor([t - m]))
