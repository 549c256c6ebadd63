"""The door to torch.ops.fp4ext: every op passes torch's own checks, and in the wrappers bytes keep their meaning."""

import pytest
import torch
from torch.library import opcheck

from fp4ext import Spec, reference
from fp4ext.functional import ops
from fp4ext.testing import assert_bytes_equal, generate

RNG = torch.tensor([0x1234567890ABCDEF, 7])
ENDS = torch.tensor([5, 5, 22], dtype=torch.int32)
KEY, ROW, MX = Spec("nvfp4", "sweep").key, Spec(rounding="stochastic", outer="row", rht=16).key, Spec("mxfp8").key


def x(*shape):
    return generate("gaussian", *(shape or (24, 40)))


def scales():
    return torch.arange(24 * 5, dtype=torch.uint8).reshape(2, 12, 5)


def quantized(key=KEY, rows=24):
    return torch.ops.fp4ext.quantize.default(x(rows, 40), key, -1, RNG, 0, None)


# One or more sets of arguments for every op; test_architecture holds this to csrc/ops/library.cpp.
SAMPLES = {
    "quantize": lambda: [
        *((x(), key, axis, RNG, 0, None) for key in (KEY, ROW, MX) for axis in (-1, -2)),
        (x(2, 24, 40), Spec(outer="expert").key, -2, None, 1, torch.ones(2, 1, 1)),
        (x(0, 40), KEY, -2, None, 2, None),
    ],
    "quantize_rowcol": lambda: [(x(), KEY, ROW, None, RNG, 0), (x(3, 24, 40), MX, MX, None, None, 2)],
    "amax": lambda: [(x(), KEY, -1, None), (x(3, 24, 40), ROW, -2, RNG)],
    "requantize": lambda: [(*quantized(), "nvfp4", 40, key, axis, RNG, 1) for key in (ROW, MX) for axis in (-1, -2)],
    "grouped_quantize": lambda: [
        *((x(), ENDS, key, axis, RNG, 2) for key in (KEY, ROW, MX) for axis in (-1, -2)),
        *((x(3, 24, 40), None, key, axis, RNG, 1) for key in (KEY, ROW, MX) for axis in (-1, -2)),
    ],
    "grouped_requantize": lambda: [
        *((*quantized(), "nvfp4", 40, ENDS, key, axis, RNG, 0) for key in (ROW, MX) for axis in (-1, -2)),
        (*torch.ops.fp4ext.quantize.default(x(3, 24, 40), MX, -1, None, 1, None), "mxfp8", 40, None, KEY, -2, None, 1),
    ],
    "dequantize": lambda: [(*quantized(key), key.split("/")[0], 40, "bfloat16") for key in (KEY, MX)],
    "gemm": lambda: [
        (*quantized(), "nvfp4", *quantized(MX, 16), "mxfp8", None, "bfloat16", "invariant", "auto"),
        (x(2, 3, 40), None, None, "fp32", x(), None, None, "fp32", torch.ones(24), "float32", "fast", "cpu"),
    ],
    "attention": lambda: [
        (x(2, 4, 3, 8), x(2, 2, 9, 8), x(2, 2, 9, 8), torch.tensor([0, 6]), 0.5),
        (x(1, 2, 5, 16).bfloat16(), x(1, 2, 5, 16), x(1, 2, 5, 16), None, 0.25),
    ],
    "gemm_add": lambda: [
        (*quantized(), "nvfp4", *quantized(MX, 16), "mxfp8", torch.ones(16), x(24, 16), "invariant", "auto")
    ],
    "grouped_gemm": lambda: [
        (*quantized(), "nvfp4", x(3, 16, 40), None, None, "fp32", ENDS, "bfloat16", "invariant", "auto"),
        (x(16, 24), None, None, "fp32", x(8, 24), None, None, "fp32", ENDS, "float32", "fast", "cpu"),
    ],
    "swizzle": lambda: [(scales(),), (scales()[0, :0],), (scales()[0], torch.tensor([3, 3, 10], dtype=torch.int32))],
    "unswizzle": lambda: [(torch.zeros(2, 1024, dtype=torch.uint8), 12, 5)],
    "draw_rng": lambda: [(x(), 3)],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for args in SAMPLES[name]():
        opcheck(getattr(torch.ops.fp4ext, name).default, args, test_utils=checks[:3] if name == "draw_rng" else checks)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_swizzle_keeps_the_dtype(dtype):
    s = scales().view(dtype)
    assert ops.swizzle(s).dtype == dtype
    assert_bytes_equal(ops.unswizzle(ops.swizzle(s), 12, 5).view(torch.uint8), scales())


@pytest.mark.parametrize("ends", [[0, 3, 3, 135], [300, 301], [0, 0], [128, 256]], ids=str)
def test_swizzled_scales_of_experts(ends):
    """Each expert's rows as a matrix of their own, one after the other, then zeros: room for any offsets."""
    g = torch.Generator().manual_seed(1)
    s = torch.randint(1, 256, (ends[-1] + 2, 6), generator=g).to(torch.uint8)
    got = ops.swizzle(s, torch.tensor(ends, dtype=torch.int32))
    assert got.shape == ((len(s) + 127 * len(ends)) // 128 * 128, 8)
    parts = [reference.swizzle(s[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    wanted = torch.zeros(got.numel(), dtype=torch.uint8)
    wanted[: sum(map(len, parts))] = torch.cat(parts)
    assert_bytes_equal(got.flatten(), wanted, f"{ends}")


def test_swizzle_refuses():
    s, ends = scales(), torch.tensor([3, 10], dtype=torch.int32)
    for args, why in (
        ((s, ends), r"scales has shape .*; accepted: \[rows, blocks\] with offsets"),
        ((s[0, 0],), r"accepted: \[.., rows, blocks\]"),
        ((s[0], ends.long()), "offsets is int64; accepted: int32"),
        ((s[0], ends * 10), r"offsets\[0\] is 30; accepted: at most"),
    ):
        with pytest.raises(RuntimeError, match=why):
            torch.ops.fp4ext.swizzle(*args)


def test_bytes_of_another_format_are_refused():
    """A view as bytes must not turn one format into another."""
    codes, block_scales, outer = ops.quantize(x(), KEY)
    with pytest.raises(RuntimeError, match="scales is float8_e8m0fnu; accepted: uint8"):
        ops.dequantize(codes, block_scales.view(torch.float8_e8m0fnu), outer, "nvfp4", 40, "float32")
    with pytest.raises(RuntimeError, match="codes is int8; accepted: uint8"):
        ops.dequantize(codes.view(torch.int8), block_scales, outer, "nvfp4", 40, "float32")
    with pytest.raises(RuntimeError, match="scales is float8_e5m2; accepted: uint8"):
        ops.swizzle(scales().view(torch.float8_e5m2))
    as_bytes = ops.dequantize(codes, block_scales.view(torch.uint8), outer, "nvfp4", 40, "float32")
    assert_bytes_equal(as_bytes, ops.dequantize(codes, block_scales, outer, "nvfp4", 40, "float32"))


def test_a_draw_has_64_bits_a_word_and_no_offset_shared():
    """Streams of one call, and calls, differ in seed and offset."""
    torch.manual_seed(0)
    drawn = torch.stack([ops.draw_rng(x(), 3) for _ in range(64)]).flatten()
    assert drawn.dtype == torch.int64 and drawn.min() >= 0 and drawn.max() > 2**62
    assert len(set(drawn.tolist())) == 64 * 3 * 2 == len({v % 2**32 for v in drawn.tolist()})
