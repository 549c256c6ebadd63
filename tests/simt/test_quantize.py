"""The CUDA quantizers on the SIMT machine: byte-equal to the CPU's, for every spec, shape and schedule."""

import itertools

import pytest
import torch

import fp4ext
from fp4ext.policy.spec import RHTS, ROUNDINGS, Spec
from fp4ext.testing import KINDS, assert_bytes_equal, assert_same_quantized, generate

RNG = torch.tensor([0x1234567890ABCDEF, 7])
SHARD = torch.tensor([-5, 9, 1000, 256])


def full(*keys):
    """The canonical keys, which ops want."""
    return [Spec.parse(key).key for key in keys]


# Each kernel once, with what can be hung on it.
KEYS = full(
    "nvfp4",
    "nvfp4/sweep/nearest/1x16/pow2",
    "nvfp4/four_over_six/nearest/1x16/row_pow2",
    "nvfp4/sweep/eden/1x16/row_pow2/32x2",
    "nvfp4/minvar/stochastic/1x16/row/32",
    "nvfp4/sweep/eden/1x16/tensor/128x2",
    "nvfp4/amax/eden/1x16/row/64",
    "nvfp4/four_over_six/nearest/16x16",
    "nvfp4/minvar/stochastic/16x16/pow2",
    "mxfp8/ceil/stochastic/1x32/none/16x2",
    "mxfp8_e5m2/floor/nearest/1x32/none/128",
    "mxfp4/ceil/nearest/1x32/none/64",
    "nvfp4/amax/eden_block/1x16/tensor/128",
)


def specs():
    """Every combination that Spec accepts, the RHT thinned to one of each kind."""
    out = []
    for fmt in fp4ext.formats.FORMATS.values():
        for scale, rounding, block, outer, rht in itertools.product(
            fmt.scale_rules, ROUNDINGS, fmt.blocks, fmt.outers, ("none", "16", "128x2")
        ):
            try:
                out.append(Spec(fmt.name, scale, rounding, block, outer, rht))
            except ValueError:
                pass
    return out


ALL = specs()


def check(simt, x, key, axis=-1, role=0, rng=RNG):
    (key,) = full(key)
    wanted = torch.ops.fp4ext.quantize(x, key, axis, rng, role, None)
    got = simt.ops.quantize(x, key, axis, rng, role, None)
    assert_same_quantized(got, wanted, f"{key} axis={axis} {tuple(x.shape)} {x.dtype}")


@pytest.mark.parametrize("spec", ALL, ids=lambda s: s.key)
def test_every_spec(simt, spec):
    shape = (2, 16, 128) if spec.group == "expert" else (20, 128)
    turn = ALL.index(spec)
    simt.configure(seed=turn, asynchronous=simt.MODES[turn % 3])
    for i, axis in enumerate((-1, -2)):
        kind = KINDS[(2 * turn + i) % len(KINDS)]
        check(simt, generate(kind, *shape, seed=turn, dtype=torch.bfloat16), spec.key, axis, role=turn % 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_data(simt, kind, dtype):
    x = generate(kind, 48, 144, seed=5, dtype=dtype)
    for key, axis in zip(KEYS, itertools.cycle((-1, -2))):
        check(simt, x, key, axis)


@pytest.mark.parametrize("key", [key for key in KEYS if key.startswith("nvfp4")])
@pytest.mark.parametrize("k", [-100, 115])
def test_magnitude(simt, key, k):
    """Squares of such values are 0 or infinite, unless they are normalized first."""
    x = generate("gaussian", 64, 128, seed=14) * 2.0**k
    for axis in (-1, -2):
        check(simt, x, key, axis)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("shape", [(1, 80), (3, 17), (33, 1), (130, 48), (5, 131), (129, 257)], ids=str)
def test_ragged(simt, key, shape):
    """Rows and columns that fill no tile, no block, no 16 bytes."""
    for dtype, axis in itertools.product((torch.bfloat16, torch.float32), (-1, -2)):
        check(simt, generate("student_t3", *shape, seed=3, dtype=dtype), key, axis, rng=SHARD)


@pytest.mark.parametrize("key", KEYS)
def test_unaligned(simt, key):
    """A row stride that is a multiple of 16 bytes, from an address that is not."""
    storage = generate("gaussian", 40 * 64 + 3, seed=1, dtype=torch.bfloat16)
    x = storage[3:].view(40, 64)
    assert x.is_contiguous() and x.data_ptr() % 16
    for axis in (-1, -2):
        check(simt, x, key, axis)


@pytest.mark.parametrize("rht", RHTS[1:])
@pytest.mark.parametrize(
    "key", ["nvfp4/amax/nearest/1x16/tensor/", "nvfp4/sweep/eden/1x16/row/", "mxfp8/ceil/nearest/1x32/none/"]
)
def test_every_rht(simt, key, rht):
    """K = 176 = 16·11 and 160 = 32·5 shorten it; 100 is padded first."""
    for k in (176, 160, 100, 256):
        check(simt, generate("outliers30", 9, k, seed=k), key + rht)
        check(simt, generate("outliers30", k, 9, seed=k), key + rht, axis=-2)


def test_the_sum_of_an_rht_keeps_its_order(simt):
    """Exponents spread over 2^24 in one vector: another order of additions would move bits."""
    x = generate("wide", 64, 128, seed=6)
    for rht in ("16", "128", "128x2"):
        check(simt, x, f"nvfp4/amax/nearest/1x16/tensor/{rht}")


@pytest.mark.parametrize("size", [64, 96, 128, 192, 256, 384])
def test_square_sizes(simt, size):
    """On both sides of every tile's edge, and 64×64 of 2.3, stochastically, never all zeros."""
    check(simt, generate("gaussian", size, size, seed=size, dtype=torch.bfloat16), "nvfp4/amax/stochastic")
    if size == 64:
        codes, _, _ = simt.ops.quantize(
            torch.full((64, 64), 2.3), "nvfp4/amax/stochastic/1x16/tensor/none", -1, RNG, 2, None
        )
        assert codes.count_nonzero() == codes.numel()
        check(simt, torch.full((64, 64), 2.3), "nvfp4/amax/stochastic", role=2)


@pytest.mark.parametrize("key", KEYS)
def test_rowcol_is_both(simt, key):
    """One read of x, both copies; their random streams differ."""
    for shape in ((130, 144), (2, 48, 64)):
        x = generate("gaussian", *shape, seed=8, dtype=torch.bfloat16)
        got = simt.ops.quantize_rowcol(x, key, key, RNG, SHARD, 1)
        wanted = torch.ops.fp4ext.quantize_rowcol(x, key, key, RNG, SHARD, 1)
        assert_same_quantized(got[:3], wanted[:3], f"{key} rows")
        assert_same_quantized(got[3:], wanted[3:], f"{key} columns")


@pytest.mark.parametrize(
    "row, col",
    [
        ("nvfp4/amax/stochastic", "nvfp4/amax/stochastic/1x16/tensor/16"),  # the recipe of arXiv 2509.25149: one read
        ("nvfp4/sweep", "nvfp4/sweep/eden/1x16/tensor/128x2"),
        ("nvfp4/amax/nearest/16x16", "nvfp4/amax"),
        ("nvfp4/amax/nearest/16x16/tensor", "nvfp4/amax/nearest/16x16/pow2"),
        ("mxfp8", "nvfp4"),
    ],
)
def test_rowcol_of_two_specs(simt, row, col):
    row, col = full(row, col)
    x = generate("outliers30", 100, 80, seed=9)
    got = simt.ops.quantize_rowcol(x, row, col, RNG, SHARD, 2)
    wanted = torch.ops.fp4ext.quantize_rowcol(x, row, col, RNG, SHARD, 2)
    assert_same_quantized(got[:3], wanted[:3], f"{row} rows")
    assert_same_quantized(got[3:], wanted[3:], f"{col} columns")


@pytest.mark.parametrize("schedule", range(6))
def test_no_schedule_matters(simt, schedule):
    """Whichever warp runs ahead, whatever lies in shared memory."""
    simt.configure(seed=100 + schedule, asynchronous=simt.MODES[schedule % 3])
    x = generate("gaussian", 130, 130, seed=4, dtype=torch.bfloat16)
    for key in KEYS:
        check(simt, x, key, axis=-1 - schedule % 2)


@pytest.mark.parametrize("key", [key for key in KEYS if key.startswith("nvfp4")])
def test_amax_and_a_given_one(simt, key):
    x = generate("nonfinite", 50, 96, seed=2)
    for axis in (-1, -2):
        amax = simt.ops.amax(x, key, axis, RNG)
        assert_bytes_equal(amax, torch.ops.fp4ext.amax(x, key, axis, RNG), key)
        got = simt.ops.quantize(x, key, axis, RNG, 0, amax * 1.5)
        assert_same_quantized(got, torch.ops.fp4ext.quantize(x, key, axis, RNG, 0, amax * 1.5), key)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 4, 16), (1, 1)], ids=str)
def test_empty_and_tiny(simt, key, shape):
    check(simt, torch.ones(shape), key)


@pytest.mark.parametrize("format", list(fp4ext.formats.FORMATS))
def test_dequantize(simt, format):
    for shape in ((7, 100), (2, 5, 64), (33, 16)):
        x = generate("nonfinite", *shape, seed=11)
        q = torch.ops.fp4ext.quantize(x, *full(format), -1, None, 0, None)
        for dtype in ("float32", "bfloat16", "float16"):
            args = *q, format, shape[-1], dtype
            assert_bytes_equal(simt.ops.dequantize(*args), torch.ops.fp4ext.dequantize(*args), f"{format} {dtype}")


def test_dequantize_every_byte(simt):
    """All codes under all scales: E8M0 bytes 0 and 255 are 2^-127 and NaN."""
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    for format, block in (("nvfp4", 16), ("mxfp8", 32), ("mxfp8_e5m2", 32), ("mxfp4", 32)):
        codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
        blocks = codes.shape[1] * (2 if "fp4" in format else 1) // block
        for global_scale in (torch.tensor(1.0), torch.tensor(0.37)):
            args = codes, scales.expand(256, blocks), global_scale, format, blocks * block, "float32"
            assert_bytes_equal(simt.ops.dequantize(*args), torch.ops.fp4ext.dequantize(*args), format)


@pytest.mark.parametrize("key", KEYS)
def test_requantize(simt, key):
    x = generate("student_t3", 70, 100, seed=12)
    for stored in ("nvfp4/sweep/nearest/1x16/row", "mxfp8"):
        q = torch.ops.fp4ext.quantize(x, *full(stored), -1, None, 0, None)
        for axis in (-1, -2):
            args = *q, stored.split("/")[0], 100, key, axis, RNG, 1
            assert_same_quantized(simt.ops.requantize(*args), torch.ops.fp4ext.requantize(*args), f"{stored} → {key}")


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (2, 33, 7), (3, 0, 4), (0, 130, 3)], ids=str)
def test_swizzle(simt, shape):
    scales = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    swizzled = simt.ops.swizzle(scales)
    assert_bytes_equal(swizzled, torch.ops.fp4ext.swizzle(scales), f"swizzle {shape}")
    assert_bytes_equal(simt.ops.unswizzle(swizzled, *shape[-2:]), scales, f"unswizzle {shape}")


@pytest.mark.parametrize(
    "key", ["nvfp4/sweep", "nvfp4/amax/nearest/16x16", "mxfp8", "mxfp4/ceil/nearest/1x32/none/128"]
)
def test_quantize_swizzled(simt, key):
    """Scales straight into the tensor cores' layout, each matrix padded alone, the padding zero."""
    x = generate("gaussian", 2, 150, 200, seed=13)
    (key,) = full(key)
    one = torch.ones(1)
    row_codes, row_scales, col_codes, col_scales = simt.ops.quantize_swizzled(x, key, RNG, one * 3, 1 / (one * 3))
    amax = torch.tensor((2688.0 if "amax" in key else 1536.0) / 3) if key.startswith("nvfp4") else None
    for axis, codes, scales in ((-1, row_codes, row_scales), (-2, col_codes, col_scales)):
        wanted = torch.ops.fp4ext.quantize(x, key, axis, RNG, 0, amax)
        assert_bytes_equal(codes, wanted[0], f"{key} {axis} codes")
        assert_bytes_equal(scales, torch.ops.fp4ext.swizzle(wanted[1]), f"{key} {axis} scales")


def test_refusals(simt):
    x = torch.ones(4, 32)
    for args, words in (
        (("nvfp4/amax/stochastic", -1, None, 0, None), "rng is missing"),
        (("nvfp4", -3, None, 0, None), "axis is -3"),
        (("mxfp8", -1, None, 0, torch.ones(())), "no outer scale"),
        (("nvfp4/amax/nearest/1x16/expert", -1, None, 0, None), "accepted with outer='expert'"),
    ):
        with pytest.raises(RuntimeError, match=words):
            simt.ops.quantize(x, *full(args[0]), *args[1:])
