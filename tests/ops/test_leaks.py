"""An op keeps nothing of a call: what it allocates and does not return is freed."""

import ctypes
import gc

import pytest
import torch

import fp4ext
from fp4ext.functional import ops

OFFSETS = torch.tensor([8, 8, 16], dtype=torch.int32)


class Heap(ctypes.Structure):
    """What glibc's mallinfo2 returns; uordblks and hblkhd are the bytes in use."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


@pytest.fixture
def bytes_in_use():
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("glibc 2.33 has mallinfo2, this C library does not")
    libc.mallinfo2.restype = Heap

    def read() -> int:
        gc.collect()
        heap = libc.mallinfo2()
        return heap.uordblks + heap.hblkhd

    return read


def calls():
    x = torch.randn(16, 32)
    q, e = fp4ext.quantize(x, "nvfp4"), fp4ext.quantize(torch.randn(3, 8, 32), "nvfp4", outer="expert")
    key, heads = fp4ext.Spec().key, torch.randn(1, 2, 4, 8)
    return {
        "quantize": lambda: fp4ext.quantize(x, "nvfp4", scale="sweep"),
        "quantize_rowcol": lambda: ops.quantize_rowcol(x, key, key, None, None, 0),
        "requantize": lambda: fp4ext.quantize(q, "mxfp8", axis=-2),
        "amax": lambda: ops.amax(x, key, -1, None),
        "dequantize": lambda: q.dequantize(torch.float32),
        "gemm": lambda: fp4ext.gemm(q, q),
        "grouped_quantize": lambda: fp4ext.grouped_quantize(x, "nvfp4", OFFSETS),
        "grouped_gemm": lambda: fp4ext.grouped_gemm(q, e, OFFSETS),
        "attention": lambda: fp4ext.attention(heads, heads, heads),
    }


@pytest.mark.parametrize("name", calls())
def test_a_call_keeps_nothing(name, bytes_in_use):
    call = calls()[name]
    for _ in range(200):
        call()
    before = bytes_in_use()
    for _ in range(500):
        call()
    kept = (bytes_in_use() - before) / 500
    assert kept < 8, f"{kept:.0f} bytes a call stay"


def refused_calls():
    """An argument is wrong, be it the first that is looked at or the last."""
    op, x = torch.ops.fp4ext, torch.randn(16, 32)
    q, key, heads = fp4ext.quantize(x, "nvfp4"), fp4ext.Spec().key, torch.randn(1, 2, 4, 8)
    stored = (q.codes, q.scales.view(torch.uint8), q.global_scale, "nvfp4")
    wrong = (q.codes[:, :4], *stored[1:])
    return {
        "quantize dtype": lambda: op.quantize(x.long(), key, -1, None, 0, None),
        "quantize spec": lambda: op.quantize(x, "nvfp5" * 20, -1, None, 0, None),
        "quantize amax": lambda: op.quantize(x, key, -1, None, 0, torch.ones(3)),
        "quantize_rowcol": lambda: op.quantize_rowcol(x.long(), key, key, None, None, 0),
        "quantize_rowcol second": lambda: op.quantize_rowcol(x, key, "b" * 40, None, None, 0),
        "requantize": lambda: op.requantize(*wrong, 32, key, -1, None, 0),
        "grouped_quantize": lambda: op.grouped_quantize(x.long(), OFFSETS, key, -1, None, 0),
        "grouped_quantize offsets": lambda: op.grouped_quantize(x, OFFSETS + 9, key, -1, None, 0),
        "grouped_requantize": lambda: op.grouped_requantize(*wrong, 32, OFFSETS, key, -1, None, 0),
        "amax": lambda: op.amax(x.long(), key, -1, None),
        "dequantize": lambda: op.dequantize(*wrong, 32, "float32"),
        "dequantize dtype": lambda: op.dequantize(*stored, 32, "float64"),
        "gemm": lambda: op.gemm(*wrong, *stored, None, "float32", "invariant", "auto"),
        "gemm bias": lambda: op.gemm(*stored, *stored, x, "float32", "invariant", "auto"),
        "gemm backend": lambda: op.gemm(*stored, *stored, None, "float32", "invariant", "none of these"),
        "gemm_add": lambda: op.gemm_add(*stored, *stored, None, x, "invariant", "auto"),
        "grouped_gemm": lambda: op.grouped_gemm(*wrong, *stored, OFFSETS, "float32", "invariant", "auto"),
        "swizzle": lambda: op.swizzle(x, OFFSETS),
        "attention": lambda: op.attention(heads, heads[:, :, :, 1:], heads, None, 1.0),
    }


@pytest.mark.parametrize("name", refused_calls())
def test_a_refusal_keeps_nothing(name, bytes_in_use):
    call = refused_calls()[name]

    def refused(times):
        for _ in range(times):
            try:
                call()
            except RuntimeError:
                continue
            raise AssertionError("taken")

    refused(100)
    before = bytes_in_use()
    refused(200)
    kept = (bytes_in_use() - before) / 200
    assert kept < 8, f"{kept:.0f} bytes a call stay"
