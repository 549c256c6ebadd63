"""Products of fp32 and fp16 on the SIMT machine: the lane order itself in fp32 FMA, so the bytes of the CPU.

Whatever stands beside them, dense, over rows of experts and over their tokens.
"""

import pytest
import torch

from fp4ext.testing import assert_bytes_equal, generate

from .operands import PLAIN, Operand, operand
from .test_gemm import OFFSETS, gemm, tokens

PAIRS = [
    ("fp32", "fp32"),
    ("fp16", "fp16"),
    ("fp32", "fp16"),
    ("bf16", "fp32"),
    ("fp32", "nvfp4"),
    ("mxfp4", "fp16"),
    ("fp32", "mxfp8"),
    ("mxfp8_e5m2", "fp32"),
]
# Rows that fill no tile, K that fills no lane, no sixteen, no step and no chunk; on both sides of 16 rows.
SHAPES = [(1, 1, 1), (3, 5, 17), (16, 70, 80), (17, 40, 1040), (33, 9, 31), (5, 67, 2085)]


def on_cpu(x, w, bias=None, out_dtype="float32"):
    return torch.ops.fp4ext.gemm(*x.parts, *w.parts, bias, out_dtype, "invariant", "cpu")


def check(simt, x, w, bias=None, out_dtype="float32"):
    y = gemm(simt, "lanes", x, w, bias, None, out_dtype)
    where = f"{x.format} {w.format} {tuple(x.codes.shape)} {tuple(w.codes.shape)} {out_dtype}"
    assert_bytes_equal(y, on_cpu(x, w, bias, out_dtype), where)


def unaligned(o):
    """The same, at an address that is a multiple of its elements' size alone."""
    flat = torch.cat([o.codes.new_zeros(1), o.codes.flatten()])
    return Operand(o.format, flat[1:].view(o.codes.shape), o.scales, o.outer)


@pytest.mark.parametrize("x_format, w_format", PAIRS)
def test_the_bytes_of_the_cpu(simt, x_format, w_format):
    for i, (m, n, k) in enumerate(SHAPES):
        x, w = operand(x_format, m, k, seed=i, outer="row"), operand(w_format, n, k, seed=50 + i)
        simt.configure(seed=i, asynchronous=simt.MODES[i % 3])
        bias = torch.randn(n, generator=torch.Generator().manual_seed(i)) if i % 2 else None
        check(simt, x, w, bias, ("float32", "bfloat16")[i // 2 % 2])
        check(simt, unaligned(x), w)
        check(simt, x, unaligned(w))


@pytest.mark.parametrize("kind", ["student_t3", "outliers30", "tiny", "nonfinite"])
def test_every_kind_of_data(simt, kind):
    """Sums that cancel, subnormals, infinities and NaNs: in their rows and columns, and nowhere else."""
    x, w = (Operand("fp32", generate(kind, rows, 1100, seed=rows)) for rows in (18, 9))
    check(simt, x, w)
    x.codes = x.codes.half()
    check(simt, Operand("fp16", x.codes), w)


def test_the_sign_of_zero(simt):
    """Sums that underflow to -0 stay -0: no zero is added. K ends in either sixteen of a step."""
    for k in (16, 48, 1040, 1072, 7):
        x = Operand("fp32", torch.full((2, k), -1e-30))
        w = Operand("fp32", torch.full((3, k), 1e-30))
        wanted = on_cpu(x, w)
        assert torch.equal(wanted.signbit(), torch.full((2, 3), k % 16 == 0)) and not wanted.any()
        check(simt, x, w)


@pytest.mark.parametrize("format", ["fp32", "fp16"])
def test_rows_are_invariant(simt, format):
    """A row alone, among few (the other tile), in another place: the same bits."""
    x, w = operand(format, 40, 1104, seed=5), operand(format, 24, 1104, seed=6)
    whole = gemm(simt, "lanes", x, w)
    for rows in (slice(0, 1), slice(39, 40), slice(5, 21), torch.randperm(40)[:35]):
        assert_bytes_equal(gemm(simt, "lanes", x[rows], w), whole[rows], f"{rows}")


def test_no_stripe_of_tiles_is_lost(simt):
    """More tiles side by side than a band has, and some below each other."""
    x, w = operand("fp32", 70, 20, seed=1), operand("fp32", 32 * 17 + 5, 20, seed=2)
    check(simt, x, w)
    check(simt, x[:20], operand("fp32", 32 * 33, 20, seed=3))
    check(simt, x[:9], operand("fp32", 64 * 17 + 1, 20, seed=4))


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("x_format, w_format", [("fp32", "fp32"), ("fp16", "nvfp4")])
@pytest.mark.parametrize("few", [False, True])
def test_grouped(simt, x_format, w_format, offsets, few):
    """Empty experts, unassigned rows: the bytes of the CPU's op."""
    if few:
        offsets = [min(end // 8, 14) for end in offsets]
    experts, rows = len(offsets), offsets[-1] + 2
    x, w = operand(x_format, rows, 72, seed=7), operand(w_format, experts, 40, 72, seed=8, outer="row")
    ends = torch.tensor(offsets, dtype=torch.int32)
    if x.scales is None:
        x.codes[offsets[-1] :] = torch.nan
    for out_dtype in ("float32", "bfloat16"):
        y = gemm(simt, "lanes", x, w, None, ends, out_dtype)
        wanted = torch.ops.fp4ext.grouped_gemm(*x.parts, *w.parts, ends, out_dtype, "invariant", "cpu")
        assert_bytes_equal(y, wanted, f"{offsets} {out_dtype}")


@pytest.mark.parametrize(
    "x_format, w_format", [("fp32", "fp32"), ("fp16", "bf16"), ("fp32", "nvfp4"), ("mxfp8", "fp16")]
)
@pytest.mark.parametrize("offsets", [[33, 33, 110, 127], [0, 16, 17], [0, 0], [1100, 1108]], ids=str)
def test_over_tokens(simt, x_format, w_format, offsets):
    """Each expert's tokens, at any place of a row; what belongs to no expert is not read: it is NaN."""
    ends = torch.tensor(offsets, dtype=torch.int32)
    for m, n in ((17, 7), (5, 40)):
        (x, _), (w, _) = tokens(x_format, m, offsets, 20), tokens(w_format, n, offsets, 40)
        y = gemm(simt, "lanes", x, w, None, ends, over_tokens=True)
        wanted = torch.ops.fp4ext.grouped_gemm(*x.parts, *w.parts, ends, "float32", "invariant", "cpu")
        assert_bytes_equal(y, wanted, f"{offsets}")


@pytest.mark.parametrize("offsets", [[30, 10, 40], [-5, 8, 7], [5, 2**31 - 1, 0]], ids=str)
def test_offsets_that_lie_do_no_harm(simt, offsets):
    """They are read on the device, where nothing can raise: clamped into the rows, or tokens, there are."""
    ends = torch.tensor(offsets, dtype=torch.int32)
    x, w = operand("fp32", 20, 33, seed=9), operand("fp32", 3, 16, 33, seed=10)
    assert gemm(simt, "lanes", x, w, None, ends).isfinite().all()
    assert gemm(simt, "lanes", x, operand("fp32", 16, 33, seed=10), None, ends, over_tokens=True).isfinite().all()


def test_added_to_y(simt):
    """One addition of fp32, last, after the bias; NaNs come out as one."""
    for m in (11, 20):
        x, w = operand("fp32", m, 100, seed=1), operand("fp16", 20, 100, seed=2)
        onto, bias = torch.randn(m, 20, generator=torch.Generator().manual_seed(3)), torch.arange(20) / 3
        onto[2, 3], onto[4, 5], onto[6] = torch.nan, torch.inf, -0.0
        y = gemm(simt, "lanes", x, w, bias, onto=onto)
        torch.ops.fp4ext.gemm_add(*x.parts, *w.parts, bias, onto, "invariant", "cpu")
        assert_bytes_equal(y, onto, f"{m} rows")


@pytest.mark.parametrize("schedule", range(6))
def test_no_schedule_matters(simt, schedule):
    simt.configure(seed=200 + schedule)
    for m in (3, 40):
        check(simt, operand("fp32", m, 1200, seed=15), operand("fp32", 20, 1200, seed=16))


@pytest.mark.parametrize("format", PLAIN)
def test_empty(simt, format):
    for m, n, k in ((0, 4, 16), (4, 0, 16), (2, 3, 0)):
        y = gemm(simt, "lanes", operand(format, m, k, seed=1), operand("fp32", n, k, seed=2))
        assert y.shape == (m, n) and not y.any() and not y.signbit().any()
