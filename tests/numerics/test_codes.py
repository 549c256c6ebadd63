"""Every code of every format, through the ops, on every instruction set, against ml_dtypes: exhaustive."""

import ml_dtypes
import numpy as np
import pytest
import torch

import fp4ext
from fp4ext import formats, gemm, quantize
from fp4ext.functional.qtensor import QTensor
from fp4ext.testing import assert_bytes_equal

ML = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MX = ["mxfp8", "mxfp8_e5m2", "mxfp4"]
ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
MIDPOINTS = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4}  # of E2M1, and where ties go


@pytest.fixture(params=fp4ext._C.isas(), autouse=True)
def isa(request):
    before = fp4ext._C.isa()
    fp4ext._C.force_isa(request.param)
    yield request.param
    fp4ext._C.force_isa(before)


def ml_codes(x, element):
    """ml_dtypes' codes of fp32 values, saturating."""
    return np.clip(x, -element.max, element.max).astype(ML[element.name]).view(np.uint8)


def ml_values(codes, element):
    return codes.view(ML[element.name]).astype(np.float32)


def unpacked(q):
    """Codes, one a byte, [rows, K]."""
    codes = q.codes.view(torch.uint8).numpy()
    return codes if q.format.codes_per_byte == 1 else np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)


def encode(values, format):
    """Codes of values beside a number that makes their block's scale exactly 1."""
    fmt = formats.get(format)
    anchor, k = fmt.element.max, fmt.block - 1
    padded = torch.nn.functional.pad(values, (0, -len(values) % k)).reshape(-1, k)
    x = torch.cat([torch.full((len(padded), 1), anchor, dtype=values.dtype), padded], 1)
    if format == "nvfp4":
        amax = torch.tensor(2688.0)  # 6·448: the outer scale is 1
        q = quantize(x, "nvfp4", amax=amax)
        assert q.global_scale == 1
    else:
        q = quantize(x, fmt, scale="floor")
    one = 0x38 if format == "nvfp4" else 127
    assert (q.scales.view(torch.uint8) == one).all()
    return unpacked(q)[:, 1:].reshape(-1)[: len(values)]


@pytest.mark.parametrize("format", ["nvfp4", *MX])
def test_every_bf16_value_at_scale_one(format):
    """All that a block of scale 1 can hold, the saturating ones among them (floor: up to 2^(max_exponent+1))."""
    element = formats.get(format).element
    limit = element.max if format == "nvfp4" else 2.0 ** (element.max_exponent + 1) - 2.0 ** (element.max_exponent - 8)
    values = ALL_BF16[ALL_BF16.float().abs() <= limit]
    assert len(values) > 33000
    np.testing.assert_array_equal(encode(values, format), ml_codes(values.float().numpy(), element))


@pytest.mark.parametrize("format", ["nvfp4", *MX])
def test_every_midpoint_and_its_neighbours(format):
    """Between all codes that follow each other, ± 1 ulp of fp32, both signs; ties to the even code."""
    element = formats.get(format).element
    magnitudes = ml_values(np.arange(128, dtype=np.uint8) & (7 if element.bits == 4 else 127), element)
    magnitudes = np.unique(magnitudes[np.isfinite(magnitudes)])
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    inf = np.float32(np.inf)
    x = np.concatenate([magnitudes, middle, np.nextafter(middle, -inf), np.nextafter(middle, inf)])
    x = np.concatenate([x, -x])
    np.testing.assert_array_equal(encode(torch.from_numpy(x), format), ml_codes(x, element))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("middle", MIDPOINTS)
def test_ties_of_e2m1(format, middle):
    """The contract's list, with nothing between."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    even = values.index(MIDPOINTS[middle])
    odd = even + 1 if values[even] < middle else even - 1
    m = np.float32(middle)
    x = np.array([m, np.nextafter(m, np.float32(0)), np.nextafter(m, np.float32(9))])
    wanted = np.array([even, min(even, odd), max(even, odd)], dtype=np.uint8)
    np.testing.assert_array_equal(encode(torch.from_numpy(x), format), wanted)
    np.testing.assert_array_equal(encode(torch.from_numpy(-x), format), wanted | 8)


# A block of its own for each value


def exponent(format, a, scale):
    """The contract's e - 127 of block amaxes (fp32, not 0), from exact exponents of frexp."""
    element = formats.get(format).element
    if scale == "ceil":
        mantissa, e = np.frexp(a * np.float32(1 / element.max))
        e = np.where(mantissa == 0, -127, e - (mantissa == 0.5))  # 0: the smallest amaxes vanish
    else:
        e = np.frexp(a)[1] - 1 - element.max_exponent
    return np.clip(e, -126 - int(np.log2(element.min)), 127 - element.max_exponent)


@pytest.mark.parametrize("format", MX)
@pytest.mark.parametrize("scale", ["ceil", "floor"])
def test_every_bf16_value_in_a_block_of_its_own(format, scale):
    element = formats.get(format).element
    q = quantize(ALL_BF16[:, None], format, scale=scale)
    codes, bytes_ = unpacked(q)[:, 0], q.scales.view(torch.uint8).numpy()[:, 0]
    x = ALL_BF16.float().numpy()
    zero, finite = x == 0, np.isfinite(x)
    assert (bytes_[~finite] == 255).all() and (codes[~finite] == 0).all() and q.dequantize()[~finite].isnan().all()
    assert (bytes_[zero] == 0).all()
    usual = finite & ~zero
    e = exponent(format, np.abs(x[usual]), scale)
    np.testing.assert_array_equal(bytes_[usual], e + 127)
    scaled = np.ldexp(x[usual].astype(np.float64), -e).astype(np.float32)
    np.testing.assert_array_equal(codes[usual], ml_codes(scaled, element))
    assert (q.dequantize(torch.float32)[finite].abs() <= 3.39e38).all()


@pytest.mark.parametrize("format", MX)
@pytest.mark.parametrize("scale", ["ceil", "floor"])
def test_scales_on_both_sides_of_every_power_of_two(format, scale):
    """A logarithm in fp32 rounds nextafter(2^k, 0) up."""
    powers = np.ldexp(np.float32(1), np.arange(-148, 128)).astype(np.float32)
    a = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))])
    a = a[a > 0]
    q = quantize(torch.from_numpy(a)[:, None], format, scale=scale)
    np.testing.assert_array_equal(q.scales.view(torch.uint8).numpy()[:, 0], exponent(format, a, scale) + 127)


# Decoding


def qtensor(format, codes, scales, k):
    fmt = formats.get(format)
    outer = torch.ones(()) if fmt.has_global_scale else None
    return QTensor(codes.view(fmt.codes_dtype), scales.view(fmt.scale_dtype), outer, fmt, torch.Size([len(codes), k]))


@pytest.mark.parametrize("format", ["nvfp4", *MX])
@pytest.mark.parametrize("through", ["dequantize", "gemm"])
def test_every_scale_byte(format, through):
    """1.0 under each; E8M0 byte 0 is 2^-127, which is no zero, and 254 no infinity."""
    fmt = formats.get(format)
    one = {"e2m1": 0x22, "e4m3": 0x38, "e5m2": 0x3C}[fmt.element.name]
    codes = torch.full((256, fmt.block // fmt.codes_per_byte), one, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    if fmt.has_global_scale:
        values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        codes, scales, values = codes[:128], scales[:128], values[:128]  # a scale has no sign
    else:
        values = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
    q, wanted = qtensor(format, codes, scales, fmt.block), torch.from_numpy(values)[:, None].expand(-1, fmt.block)
    if through == "dequantize":
        assert_bytes_equal(q.dequantize(torch.float32), wanted)
        assert_bytes_equal(q.dequantize(torch.bfloat16), wanted.bfloat16())
    else:
        y = gemm(q, torch.eye(fmt.block), out_dtype=torch.float32)
        assert_bytes_equal(y, wanted)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2"])
def test_every_byte_of_float8(format):
    """NaNs and the infinities of E5M2 among them."""
    element = formats.get(format).element
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    q = qtensor(format, codes, torch.full((8, 1), 127, dtype=torch.uint8), 32)
    assert_bytes_equal(q.dequantize(), torch.from_numpy(ml_values(codes.numpy(), element)))


@pytest.mark.parametrize("format, one", [("nvfp4", 0x38), ("mxfp4", 127)])
def test_every_pair_of_nibbles(format, one):
    """Element 2k in the low nibble of byte k, 2k+1 in the high one: decoded, multiplied, and encoded back."""
    block = formats.get(format).block
    codes = torch.arange(256, dtype=torch.uint8).reshape(-1, block // 2)
    q = qtensor(format, codes, torch.full((len(codes), 1), one, dtype=torch.uint8), block)
    pairs = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(len(codes), block)
    values = torch.from_numpy(ml_values(pairs, formats.E2M1))
    assert_bytes_equal(q.dequantize(), values)
    assert torch.equal(gemm(q, torch.eye(block), out_dtype=torch.float32), values)
    assert torch.equal(torch.from_numpy(encode(values.flatten(), format)), torch.from_numpy(pairs).flatten())
