"""The emulated GEMMs on the SIMT machine: within the contract's bound, bitwise on integers, row by row.

Hardware leaves the rounding inside one mma open. The machine has both extremes: to nearest, and toward zero.
"""

import pytest
import torch

import fp4ext
from fp4ext.testing import assert_bytes_equal

from .operands import Operand, exact, operand

FORMATS = ("nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2", "bf16")
PAIRS = [*zip(FORMATS, FORMATS, strict=True), ("bf16", "nvfp4"), ("mxfp8", "nvfp4"), ("nvfp4", "mxfp4")]
DECODED_PAIRS = [pair for pair in PAIRS if pair[1] != "bf16"]  # weights of 16 bits are not what decode is for
SHAPES = [(1, 1, 1), (3, 5, 17), (17, 130, 80), (130, 40, 1040), (129, 129, 64)]
DECODED = [(1, 16, 128), (3, 5, 256), (8, 40, 1152), (16, 33, 4224), (13, 16, 2048)]


def gemm(simt, kernel, x, w, bias=None, offsets=None, out_dtype="float32", over_tokens=False, onto=None):
    return simt.ops.run_gemm(kernel, *x.parts, *w.parts, bias, offsets, out_dtype, over_tokens, onto)


# An instruction cuts all terms of a sum but the largest one, L of them, F bits below the largest exponent, which the
# sum of sizes bounds, and rounds toward zero: it is off by (L·2^-F + 2^-23) of that at most (docs/numerics.md, 9). By
# kind: how much of K it takes, and that in units of 2^-24. Of bf16 these are sm_80's, the largest. The exponent of a
# block of NVFP4 is that of its scales, up to four times what is in it.
HARDWARE = {"bf16": (8, 8 + 2), "mxfp8": (32, 32 / 2 + 2), "nvfp4": (64, 4 * 4 / 2**11 + 2)}


def roundings(arithmetic, native, k):
    """The bound's factor in units of 2⁻²⁴·Σ|x̂·ŵ|: of each instruction, of each chunk's sum, and of the epilogue."""
    step, unit = (
        HARDWARE[native or "bf16"] if arithmetic == "hardware" else (16, 2 if arithmetic == "toward_zero" else 1)
    )
    return -(-k // step) * unit + k // 1024 + 2


def check_bound(y, x, w, arithmetic="hardware", native=None, bias=None):
    """native: the format, of a kernel whose instructions take codes and scales."""
    wanted, size = exact(x, w, bias)
    bound = roundings(arithmetic, native, x.values().shape[-1]) * 2.0**-24 * size + 2.0**-24 * wanted.abs()
    error = (y.double() - wanted).abs()
    assert (error <= bound).all(), f"{(error / bound).max():.3g} of the bound"
    return (error / size.clamp_min(1e-300)).max().item()


@pytest.mark.parametrize("x_format, w_format", PAIRS)
def test_within_the_bound(simt, x_format, w_format):
    for i, (m, n, k) in enumerate(SHAPES):
        x, w = operand(x_format, m, k, seed=i, outer="row"), operand(w_format, n, k, seed=50 + i)
        simt.configure(seed=i, asynchronous=simt.MODES[i % 3], arithmetic=simt.ARITHMETICS[i % 3])
        check_bound(gemm(simt, "invariant", x, w), x, w, simt.ARITHMETICS[i % 3])


@pytest.mark.parametrize("x_format, w_format", DECODED_PAIRS)
def test_decode_within_the_bound(simt, x_format, w_format):
    for i, (m, n, k) in enumerate(DECODED):
        x, w = operand(x_format, m, k, seed=i), operand(w_format, n, k, seed=60 + i, outer="row")
        simt.configure(seed=i, asynchronous=simt.MODES[i % 3], arithmetic=simt.ARITHMETICS[i % 3])
        check_bound(gemm(simt, "decode", x, w), x, w, simt.ARITHMETICS[i % 3])


@pytest.mark.parametrize("x_format, w_format", PAIRS)
def test_integers_are_exact(simt, x_format, w_format):
    """Every partial sum is, so whatever the order and the rounding the CPU's bits come out."""
    for kernel, (m, n, k) in (("invariant", (70, 140, 1152)), ("decode", (11, 20, 1152))):
        if kernel == "decode" and w_format == "bf16":
            continue
        x, w = operand(x_format, m, k, seed=1, integers=True), operand(w_format, n, k, seed=2, integers=True)
        bias = torch.arange(n).float()
        for out_dtype in ("float32", "bfloat16"):
            y = gemm(simt, kernel, x, w, bias, None, out_dtype)
            wanted = torch.ops.fp4ext.gemm(*x.parts, *w.parts, bias, out_dtype, "invariant", "cpu")
            assert_bytes_equal(y, wanted, f"{kernel} {x_format} {w_format} {out_dtype}")


@pytest.mark.parametrize("x_format, w_format", DECODED_PAIRS)
@pytest.mark.parametrize("arithmetic", ["hardware", pytest.param("nearest", marks=pytest.mark.slow)])
def test_decode_is_prefill(simt, x_format, w_format, arithmetic):
    """Bit for bit: a sampler's token is what the trainer computes."""
    simt.configure(arithmetic=arithmetic)
    for m, n, k in ((16, 33, 2176), (5, 16, 1024), (16, 24, 384)):
        x, w = operand(x_format, m, k, seed=3, outer="row"), operand(w_format, n, k, seed=4)
        for out_dtype in ("float32", "bfloat16"):
            whole = gemm(simt, "invariant", x, w, None, None, out_dtype)
            assert_bytes_equal(gemm(simt, "decode", x, w, None, None, out_dtype), whole, f"{x_format} {w_format}")
            alone = gemm(simt, "decode", x[3:4], w, None, None, out_dtype)
            assert_bytes_equal(alone, whole[3:4], f"{x_format} {w_format} one row")


@pytest.mark.parametrize("x_format, w_format", [("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("bf16", "nvfp4")])
def test_a_row_depends_on_itself_alone(simt, x_format, w_format):
    """On no neighbour, position or batch: every cut of the rows gives the same bits."""
    x, w = operand(x_format, 140, 1104, seed=5, outer="row"), operand(w_format, 24, 1104, seed=6)
    whole = gemm(simt, "invariant", x, w)
    for rows in (slice(0, 1), slice(139, 140), slice(5, 22), torch.randperm(140)[:130]):
        assert_bytes_equal(gemm(simt, "invariant", x[rows], w), whole[rows], f"{rows}")


OFFSETS = [[0, 1, 128, 255, 384, 384, 415], [0, 0, 64, 64], [0, 0, 0], [7]]


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("kernel", ["invariant", "decode"])
def test_grouped(simt, offsets, kernel):
    """Empty experts, unassigned rows, gains far apart; each expert's rows as if it were alone."""
    if kernel == "decode":
        offsets = [min(end // 8, 14) for end in offsets]
    experts, rows, n, k = len(offsets), offsets[-1] + 2, 40, 256
    x = operand("nvfp4", rows, k, seed=7, outer="row")
    w = operand("nvfp4", experts, n, k, seed=8)
    for outer in (
        torch.tensor(100.0).pow(torch.arange(experts) % 3 - 1),
        torch.rand(experts, n, 1) + 0.5,
        torch.ones(1),
    ):
        w.outer = outer
        y = gemm(simt, kernel, x, w, None, torch.tensor(offsets, dtype=torch.int32))
        start = 0
        for e, end in enumerate(offsets):
            alone = w[e]
            if outer.dim() == 1 and outer.numel() == experts:
                alone.outer = outer[e : e + 1]
            if end > start:
                part = gemm(simt, "invariant", x[start:end], alone)
                assert_bytes_equal(y[start:end], part, f"expert {e} of {offsets}")
            start = end
        assert not y[start:].any(), "unassigned rows are zeros"


def tokens(format, rows, offsets, seed, outer="tensor"):
    """[rows, tokens], each expert's padded to blocks, and NaN past the last; and the operand of each expert."""
    counts = [end - begin for begin, end in zip([0, *offsets], offsets, strict=False)]
    parts = [operand(format, rows, n, seed=seed + e, outer=outer) for e, n in enumerate(counts)]
    codes, scales = [part.codes for part in parts], [part.scales for part in parts]
    if parts[0].scales is None:
        return Operand(format, torch.cat([*codes, torch.full((rows, 9), torch.nan, dtype=codes[0].dtype)], 1)), parts
    block = fp4ext.formats.get(format).block
    codes.append(torch.full((rows, 3 * block // (2 if "fp4" in format else 1)), 0x7F, dtype=torch.uint8))
    scales.append(torch.full((rows, 3), 0x7F if format == "nvfp4" else 0xFF, dtype=torch.uint8))
    outers = None if parts[0].outer is None else torch.stack([part.outer for part in parts])
    return Operand(format, torch.cat(codes, 1), torch.cat(scales, 1), outers), parts


@pytest.mark.parametrize(
    "x_format, w_format",
    [("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("mxfp8_e5m2", "nvfp4"), ("bf16", "nvfp4"), ("bf16", "bf16")],
)
@pytest.mark.parametrize("offsets", [[33, 33, 110, 127], [0, 16, 17], [0, 0], [1100, 1108]], ids=str)
def test_over_tokens(simt, x_format, w_format, offsets):
    """Experts with no tokens, with fewer than a block, with two chunks of them: each the product of its own tokens, bit
    for bit. What belongs to no expert is not read: its scales and elements are NaN."""
    ends = torch.tensor(offsets, dtype=torch.int32)
    for i, outer in enumerate(("tensor", "row")):
        x, xs = tokens(x_format, 17, offsets, 20, outer)
        w, ws = tokens(w_format, 130 if x_format == "bf16" and len(offsets) == 4 else 7, offsets, 40, outer)
        simt.configure(seed=i, asynchronous=simt.MODES[i])
        y = gemm(simt, "invariant", x, w, None, ends, over_tokens=True)
        onto = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        added = gemm(simt, "invariant", x, w, None, ends, over_tokens=True, onto=onto)
        for e in range(len(offsets)):
            assert_bytes_equal(y[e], gemm(simt, "invariant", xs[e], ws[e]), f"expert {e} of {offsets}")
            check_bound(y[e], xs[e], ws[e])
        assert_bytes_equal(added, onto + y, "added")


def test_over_tokens_of_integers_is_the_cpu(simt):
    """Where every sum is exact both orders give the same bits, those of the op."""
    offsets = [40, 40, 75]
    ends = torch.tensor(offsets, dtype=torch.int32)
    for format in ("nvfp4", "mxfp8", "bf16"):
        x, w = operand(format, 5, 160, seed=1, integers=True), operand(format, 9, 160, seed=2, integers=True)
        y = gemm(simt, "invariant", x, w, None, ends, "bfloat16", over_tokens=True)
        wanted = torch.ops.fp4ext.grouped_gemm(*x.parts, *w.parts, ends, "bfloat16", "invariant", "cpu")
        assert_bytes_equal(y, wanted, format)


@pytest.mark.parametrize("offsets", [[90, 10, 400], [-5, 3], [2**31 - 1, 0]], ids=str)
def test_tokens_that_lie_do_no_harm(simt, offsets):
    x, w = operand("nvfp4", 3, 128, seed=1), operand("nvfp4", 5, 128, seed=2)
    y = gemm(simt, "invariant", x, w, None, torch.tensor(offsets, dtype=torch.int32), over_tokens=True)
    assert y.shape == (len(offsets), 3, 5) and y.isfinite().all()


@pytest.mark.parametrize("kernel, formats", [("invariant", ("mxfp8", "nvfp4")), ("decode", ("bf16", "nvfp4"))])
def test_added_to_y(simt, kernel, formats):
    """One addition of fp32, last, after the bias: the CPU's bytes, where the product is exact. NaNs come out as one."""
    x, w = operand(formats[0], 11, 256, seed=1, integers=True), operand(formats[1], 20, 256, seed=2, integers=True)
    onto, bias = torch.randn(11, 20, generator=torch.Generator().manual_seed(3)), torch.arange(20) / 3
    onto[2, 3], onto[4, 5], onto[6] = torch.nan, torch.inf, -0.0
    y = gemm(simt, kernel, x, w, bias, onto=onto)
    torch.ops.fp4ext.gemm_add(*x.parts, *w.parts, bias, onto, "invariant", "cpu")
    assert_bytes_equal(y, onto, kernel)


def test_offsets_that_lie_do_no_harm(simt):
    """They are read on the device, where nothing can raise: clamped into the rows there are."""
    x, w = operand("nvfp4", 20, 64, seed=9), operand("nvfp4", 3, 16, 64, seed=10)
    for offsets in ([30, 10, 40], [-5, 8, 7], [5, 2**31 - 1, 0]):
        y = gemm(simt, "invariant", x, w, None, torch.tensor(offsets, dtype=torch.int32))
        assert y.isfinite().all()


@pytest.mark.parametrize("kernel", ["invariant", "decode"])
def test_poisoned_blocks_are_nan(simt, kernel):
    """In their row, or their column, and nowhere else."""
    for format, nan in (("nvfp4", 0x7F), ("mxfp8", 0xFF)):
        x, w = operand(format, 5, 256, seed=11, integers=True), operand(format, 16, 256, seed=12, integers=True)
        x.scales[2, 3], w.scales[7, 0] = nan, nan
        y = gemm(simt, kernel, x, w)
        wanted = torch.zeros(5, 16, dtype=torch.bool)
        wanted[2], wanted[:, 7] = True, True
        assert torch.equal(y.isnan(), wanted)


def test_large_and_small_global_scales(simt):
    """Neither the product of two large nor that of two small ones is lost."""
    for g_x, g_w in ((1e30, 1e-30), (1e-39, 1e38)):
        x, w = operand("nvfp4", 4, 128, seed=13, integers=True), operand("nvfp4", 16, 128, seed=14, integers=True)
        x.outer, w.outer = torch.tensor([g_x]), torch.tensor([g_w])
        wanted = torch.ops.fp4ext.gemm(*x.parts, *w.parts, None, "float32", "invariant", "cpu")
        for kernel in ("invariant", "decode"):
            assert_bytes_equal(gemm(simt, kernel, x, w), wanted, kernel)


@pytest.mark.parametrize("schedule", range(6))
def test_no_schedule_matters(simt, schedule):
    x, w = operand("nvfp4", 16, 2304, seed=15), operand("nvfp4", 20, 2304, seed=16)
    wanted = gemm(simt, "invariant", x, w)
    simt.configure(seed=200 + schedule, asynchronous=simt.MODES[schedule % 3])
    for kernel in ("invariant", "decode"):
        assert_bytes_equal(gemm(simt, kernel, x, w), wanted, kernel)


def test_random_data_stays_far_within(simt):
    """2⁻²⁰·Σ|x̂·ŵ| on random data, rounded either way; K here is what fits a test."""
    x, w = operand("nvfp4", 8, 8192, seed=17), operand("nvfp4", 16, 8192, seed=18)
    for arithmetic in simt.ARITHMETICS:
        simt.configure(arithmetic=arithmetic)
        assert check_bound(gemm(simt, "decode", x, w), x, w, arithmetic) < 2.0**-20


@pytest.mark.parametrize("kernel", ["invariant"])
def test_empty(simt, kernel):
    for m, n, k in ((0, 4, 16), (4, 0, 16), (2, 3, 0)):
        x, w = operand("bf16", m, k, seed=1), operand("bf16", n, k, seed=2)
        y = gemm(simt, kernel, x, w)
        assert y.shape == (m, n) and not y.any()


def test_every_code_and_scale(simt):
    """Each product of an element and a scale, against one: decoding is exact, byte for byte."""
    for format in ("nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"):
        block = 16 if format == "nvfp4" else 32
        scales = torch.arange(0, 256 if format != "nvfp4" else 0x80).to(torch.uint8)
        if format != "nvfp4":  # where element·scale is a normal bf16, as the numerics contract keeps it
            scales = scales[(scales >= 32) & (scales <= 222)]
        codes = torch.arange(256, dtype=torch.uint8)
        x = operand(format, len(scales), 512 if "fp4" in format else 256, seed=0)
        x.codes, x.outer = codes.repeat(len(scales), 1), None
        x.scales = scales[:, None].expand(-1, x.scales.shape[1]).contiguous()
        k = x.scales.shape[1] * block
        for start in range(0, k, 128):
            w = operand("bf16", 128, k, seed=0)
            w.codes = torch.zeros(128, k, dtype=torch.bfloat16)
            w.codes[torch.arange(128), start + torch.arange(128)] = 1
            y = gemm(simt, "invariant", x, w)
            wanted = x.values().float()[:, start : start + 128]
            poisoned = ~x.values().isfinite().all(1)
            assert_bytes_equal(y[~poisoned] + 0.0, wanted[~poisoned] + 0.0, format)
            assert y[poisoned].isnan().all()
