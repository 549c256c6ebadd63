"""The native GEMMs on the SIMT machine: within the bound, bitwise on integers, row by row, and refusals on the host."""

import pytest
import torch

from fp4ext.testing import assert_bytes_equal

from .operands import operand
from .test_gemm import OFFSETS, check_bound, gemm

NATIVE = ["sm120", "sm100", "sm100_pairs"]
FORMATS = ["nvfp4", "mxfp8"]
SHAPES = [(1, 1, 128), (3, 130, 256), (130, 5, 384), (129, 140, 1152), (300, 70, 256)]


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("format", FORMATS)
def test_within_the_bound(simt, kernel, format):
    for i, (m, n, k) in enumerate(SHAPES):
        k -= 64 if format == "nvfp4" and i % 2 else 0
        x, w = operand(format, m, k, seed=i, outer="row"), operand(format, n, k, seed=70 + i)
        simt.configure(seed=i, asynchronous=simt.MODES[i % 3], arithmetic=simt.ARITHMETICS[i % 3])
        check_bound(gemm(simt, kernel, x, w), x, w, simt.ARITHMETICS[i % 3], format)


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("format", FORMATS)
def test_integers_are_exact(simt, kernel, format):
    """What the self-test of the first launch asks of a device: the CPU's bits."""
    x, w = operand(format, 70, 1280, seed=1, integers=True), operand(format, 140, 1280, seed=2, integers=True)
    bias = torch.arange(140).float()
    for out_dtype in ("float32", "bfloat16"):
        y = gemm(simt, kernel, x, w, bias, None, out_dtype)
        wanted = torch.ops.fp4ext.gemm(*x.parts, *w.parts, bias, out_dtype, "invariant", "cpu")
        assert_bytes_equal(y, wanted, f"{kernel} {format} {out_dtype}")


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_depends_on_itself_alone(simt, kernel, format):
    x, w = operand(format, 140, 1152, seed=5, outer="row"), operand(format, 24, 1152, seed=6)
    whole = gemm(simt, kernel, x, w)
    for rows in (slice(0, 1), slice(139, 140), slice(5, 22), torch.randperm(140)[:130]):
        assert_bytes_equal(gemm(simt, kernel, x[rows], w), whole[rows], f"{rows}")


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("asynchronous", ["late", "early", "random"])
def test_many_tiles(simt, kernel, format, asynchronous):
    """More than a persistent grid has blocks (the machine has three multiprocessors): twelve experts of a row each, one
    of none, unassigned rows between the products."""
    ends = torch.tensor([1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12], dtype=torch.int32)
    k = 256 if format == "nvfp4" else 128
    x, w = operand(format, 14, k, seed=3, integers=True), operand(format, len(ends), 8, k, seed=4, integers=True)
    wanted = torch.ops.fp4ext.grouped_gemm(*x.parts, *w.parts, ends, "float32", "invariant", "cpu")
    simt.configure(seed=5, asynchronous=asynchronous)
    assert_bytes_equal(gemm(simt, kernel, x, w, None, ends), wanted, f"{kernel} {format}")


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_grouped(simt, kernel, format, offsets):
    """Empty experts and unassigned rows; each expert's rows as if it were alone."""
    experts, rows = len(offsets), offsets[-1] + 2
    x, w = operand(format, rows, 256, seed=7), operand(format, experts, 160, 256, seed=8, outer="row")
    y = gemm(simt, kernel, x, w, None, torch.tensor(offsets, dtype=torch.int32))
    start = 0
    for e, end in enumerate(offsets):
        if end > start:
            assert_bytes_equal(y[start:end], gemm(simt, kernel, x[start:end], w[e]), f"expert {e}")
        start = end
    assert not y[start:].any(), "unassigned rows are zeros"


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("format, nan", [("nvfp4", 0x7F), ("mxfp8", 0xFF)])
def test_rows_of_nobody_are_not_read(simt, kernel, format, nan):
    """NaN there, which a tile brings along, reaches no expert's row, and gives zeros."""
    x, w = operand(format, 150, 256, seed=9, integers=True), operand(format, 2, 90, 256, seed=10, integers=True)
    ends = torch.tensor([1, 140], dtype=torch.int32)
    wanted = torch.ops.fp4ext.grouped_gemm(*x.parts, *w.parts, ends, "float32", "invariant", "cpu")
    x.scales[140:] = nan
    if format == "mxfp8":
        x.codes[140:] = 0x7F
    assert_bytes_equal(gemm(simt, kernel, x, w, None, ends), wanted, f"{kernel} {format}")


@pytest.mark.parametrize("format", FORMATS)
def test_pairs_give_the_bits_of_single_blocks(simt, format):
    """So that either may be taken, whatever M is."""
    for i, (m, n, k) in enumerate([(1, 70, 384), (128, 65, 256), (257, 200, 640), (400, 30, 1664)]):
        x, w = operand(format, m, k, seed=i, outer="row"), operand(format, n, k, seed=20 + i)
        simt.configure(seed=i, asynchronous=simt.MODES[i % 3], arithmetic=simt.ARITHMETICS[i % 2])
        assert_bytes_equal(gemm(simt, "sm100_pairs", x, w), gemm(simt, "sm100", x, w), f"{format} {m}x{n}x{k}")
    x, w = operand(format, 420, 256, seed=30), operand(format, 4, 100, 256, seed=31)
    ends = torch.tensor([0, 130, 400, 401], dtype=torch.int32)
    assert_bytes_equal(gemm(simt, "sm100_pairs", x, w, None, ends), gemm(simt, "sm100", x, w, None, ends), format)


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("schedule", range(3))
def test_no_schedule_matters(simt, kernel, format, schedule):
    x, w = operand(format, 20, 1408, seed=15), operand(format, 20, 1408, seed=16)
    wanted = gemm(simt, kernel, x, w)
    simt.configure(seed=300 + schedule, asynchronous=simt.MODES[schedule])
    assert_bytes_equal(gemm(simt, kernel, x, w), wanted, kernel)


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("format, nan", [("nvfp4", 0x7F), ("mxfp8", 0xFF)])
def test_poisoned_blocks_are_nan(simt, kernel, format, nan):
    x, w = operand(format, 5, 256, seed=11, integers=True), operand(format, 16, 256, seed=12, integers=True)
    x.scales[2, 3], w.scales[7, 0] = nan, nan
    wanted = torch.zeros(5, 16, dtype=torch.bool)
    wanted[2], wanted[:, 7] = True, True
    assert torch.equal(gemm(simt, kernel, x, w).isnan(), wanted)


@pytest.mark.parametrize("kernel", NATIVE)
def test_what_it_does_not_take(simt, kernel):
    for x_format, w_format, k in (("nvfp4", "nvfp4", 48), ("nvfp4", "mxfp4", 128), ("mxfp8", "mxfp8_e5m2", 128)):
        with pytest.raises(RuntimeError, match="does not take"):
            gemm(simt, kernel, operand(x_format, 4, k, seed=0), operand(w_format, 4, k, seed=0))
