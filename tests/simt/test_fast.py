"""The route `fast`: decoded to bf16, multiplied by torch, finished by the epilogue; within its
bound, whatever the order.

Here torch multiplies on the CPU, in fp32; decoding and finishing are the kernels themselves, on the SIMT machine.
"""

import pytest
import torch

from fp4ext.testing import assert_bytes_equal

from .operands import operand
from .test_dispatch import by
from .test_gemm import PAIRS, check_bound


def fast(simt, x, w, bias=None, out_dtype="float32", accumulate="fast", backend="fast"):
    return simt.ops.gemm(*x.parts, *w.parts, bias, out_dtype, accumulate, backend)


@pytest.mark.parametrize("x_format, w_format", PAIRS)
def test_within_the_bound(simt, device, x_format, w_format):
    device(90)
    for i, (m, n, k) in enumerate([(1, 1, 1), (3, 5, 17), (17, 130, 80), (20, 1030, 1040)]):
        x, w = operand(x_format, m, k, seed=i, outer="row"), operand(w_format, n, k, seed=50 + i, outer="row")
        check_bound(fast(simt, x, w), x, w, "toward_zero")  # fp32 on the CPU: another order, twice the roundings


@pytest.mark.parametrize("x_format, w_format", PAIRS)
def test_integers_are_exact(simt, device, x_format, w_format):
    device(90)
    m, n, k = 20, 40, 1152
    x, w = operand(x_format, m, k, seed=1, integers=True), operand(w_format, n, k, seed=2, integers=True)
    bias = torch.arange(n).float()
    for out_dtype in ("float32", "bfloat16"):
        wanted = torch.ops.fp4ext.gemm(*x.parts, *w.parts, bias, out_dtype, "invariant", "cpu")
        assert_bytes_equal(fast(simt, x, w, bias, out_dtype), wanted, f"{x_format} {w_format} {out_dtype}")


def test_the_end_of_the_law(simt, device):
    """Global scales in one product of doubles; a poisoned block is the canonical NaN of its row."""
    device(90)
    for g_x, g_w in ((1e30, 1e-30), (1e-39, 1e38)):
        x, w = operand("nvfp4", 20, 128, seed=13, integers=True), operand("nvfp4", 16, 128, seed=14, integers=True)
        x.outer, w.outer = torch.tensor([g_x]), torch.tensor([g_w])
        x.scales[3, 1] = 0x7F
        wanted = torch.ops.fp4ext.gemm(*x.parts, *w.parts, None, "float32", "invariant", "cpu")
        assert wanted[3].isnan().all()
        assert_bytes_equal(fast(simt, x, w), wanted, f"{g_x} {g_w}")


def test_it_is_never_where_rows_are_promised(simt, device):
    device(90)
    x, w = operand("nvfp4", 20, 128, seed=3), operand("nvfp4", 8, 128, seed=4)
    for backend in ("auto", "emulated"):
        assert_bytes_equal(
            fast(simt, x, w, accumulate="invariant", backend=backend), by(simt, "invariant", x, w), backend
        )
    with pytest.raises(RuntimeError, match="'fast' is not row-invariant; accepted with it: accumulate 'fast'"):
        fast(simt, x, w, accumulate="invariant")
    offsets = torch.tensor([8, 20], dtype=torch.int32)
    experts = operand("nvfp4", 2, 8, 128, seed=4)
    with pytest.raises(RuntimeError, match="'fast' takes dense products; accepted for experts: auto, emulated, native"):
        simt.ops.grouped_gemm(*x.parts, *experts.parts, offsets, "float32", "fast", "fast")


def test_who_asks_for_speed_gets_it(simt, device):
    """accumulate='fast': the native kernel where there is one, else this; few rows by the decode kernel."""
    x, w = operand("nvfp4", 20, 128, seed=5), operand("nvfp4", 8, 128, seed=6)
    device(90)
    assert_bytes_equal(fast(simt, x, w, backend="auto"), fast(simt, x, w), "many rows")
    assert_bytes_equal(fast(simt, x[:3], w, backend="auto"), by(simt, "decode", x[:3], w), "few rows")
    device(120)
    assert_bytes_equal(fast(simt, x, w, backend="auto"), by(simt, "sm120", x, w), "native")


def test_empty(simt, device):
    device(90)
    for m, n, k in ((0, 4, 16), (4, 0, 16), (2, 3, 0)):
        x, w = operand("bf16", m, k, seed=1), operand("bf16", n, k, seed=2)
        y = fast(simt, x, w)
        assert y.shape == (m, n) and not y.any()
