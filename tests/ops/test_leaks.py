"""An op keeps nothing of a call: what it allocates and does not return is freed."""

import ctypes
import gc

import pytest
import torch

import fp4ext

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
        "quantize_rowcol": lambda: fp4ext.ops.quantize_rowcol(x, key, key, None, None, 0),
        "requantize": lambda: fp4ext.quantize(q, "mxfp8", axis=-2),
        "amax": lambda: fp4ext.ops.amax(x, key, -1, None),
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
