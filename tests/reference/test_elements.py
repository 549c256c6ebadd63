"""docs/numerics.md, 1: every code, every bf16 bit pattern, every tie; ml_dtypes judges."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4ext import formats
from fp4ext.reference import (
    decode_e2m1,
    decode_e4m3,
    decode_e5m2,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    pack_nibbles,
    unpack_nibbles,
)

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
NOT_NAN = ALL_BF16[~ALL_BF16.isnan()]
ELEMENTS = {
    "e2m1": (encode_e2m1, decode_e2m1, formats.E2M1, ml_dtypes.float4_e2m1fn),
    "e4m3": (encode_e4m3, decode_e4m3, formats.E4M3, ml_dtypes.float8_e4m3fn),
    "e5m2": (encode_e5m2, decode_e5m2, formats.E5M2, ml_dtypes.float8_e5m2),
}


def judge(x: torch.Tensor, element, dtype) -> torch.Tensor:
    """ml_dtypes' codes of fp32 x, clamped first: beyond the range it gives NaN or infinity."""
    clamped = np.clip(x.float().numpy(), -element.max, element.max)
    return torch.from_numpy(clamped.astype(dtype).view(np.uint8).copy())


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_bf16_value_as_ml_dtypes(name):
    encode, _, element, dtype = ELEMENTS[name]
    assert torch.equal(encode(NOT_NAN), judge(NOT_NAN, element, dtype))


@pytest.mark.parametrize("name", ELEMENTS)
def test_fp32_and_fp16_values_as_ml_dtypes(name):
    """Random fp32 bit patterns, every midpoint of two codes, and one ulp to each side of it."""
    encode, decode, element, dtype = ELEMENTS[name]
    random = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64, generator=torch.Generator().manual_seed(1))
    random = random.to(torch.int32).view(torch.float32)
    values = decode(torch.arange(256 if element.bits == 8 else 16, dtype=torch.uint8))
    values = values[values.isfinite()].unique()
    midpoints = (values[1:] + values[:-1]) / 2
    inf = torch.tensor(torch.inf)
    x = torch.cat([random[~random.isnan()], values, midpoints, midpoints.nextafter(inf), midpoints.nextafter(-inf)])
    assert torch.equal(encode(x), judge(x, element, dtype))
    half = x.to(torch.float16)
    assert torch.equal(encode(half), judge(half, element, dtype))


@pytest.mark.parametrize("name", ELEMENTS)
def test_codes_round_trip(name):
    encode, decode, element, dtype = ELEMENTS[name]
    codes = torch.arange(256 if element.bits == 8 else 16, dtype=torch.uint8)
    values = decode(codes)
    judged = torch.from_numpy(codes.numpy().view(dtype).astype(np.float32))
    assert torch.equal(values.nan_to_num(7.5e7, 8e7, -8e7), judged.nan_to_num(7.5e7, 8e7, -8e7))
    finite = values.isfinite()
    assert torch.equal(encode(values[finite]), codes[finite])


def test_e2m1_midpoints_go_to_the_even_code():
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    ties = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    below = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
    above = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    inf = torch.tensor(torch.inf)
    for sign in (1, -1):
        assert torch.equal(decode_e2m1(encode_e2m1(sign * midpoints)), sign * ties)
        assert torch.equal(decode_e2m1(encode_e2m1(sign * midpoints.nextafter(-inf))), sign * below)
        assert torch.equal(decode_e2m1(encode_e2m1(sign * midpoints.nextafter(inf))), sign * above)


def test_sign_of_zero_and_saturation():
    x = torch.tensor([0.0, -0.0, -1e-45, -0.25, 1e30, -1e30, torch.inf, -torch.inf])
    assert encode_e2m1(x).tolist() == [0, 8, 8, 8, 7, 15, 7, 15]
    assert encode_e4m3(x).tolist() == [0, 0x80, 0x80, 0xA8, 0x7E, 0xFE, 0x7E, 0xFE]
    assert encode_e5m2(x).tolist() == [0, 0x80, 0x80, 0xB4, 0x7B, 0xFB, 0x7B, 0xFB]


def test_e4m3_nan_stays_nan():
    for encode, decode in ((encode_e4m3, decode_e4m3), (encode_e5m2, decode_e5m2)):
        assert decode(encode(torch.tensor([torch.nan]))).isnan().all()


def test_e4m3_up_is_the_least_code_not_below():
    codes = torch.arange(127, dtype=torch.uint8)
    values = decode_e4m3(codes)
    x = torch.cat(
        [NOT_NAN.float().abs(), values, values.nextafter(torch.tensor(torch.inf)), values.nextafter(torch.tensor(0.0))]
    )
    up = encode_e4m3(x, "up").long()
    least = torch.searchsorted(values, x.clamp(max=448)).clamp(max=126)  # the first value >= x
    assert torch.equal(up, least)
    assert torch.equal(encode_e4m3(values, "up"), codes)


def test_e4m3_up_of_negatives_goes_toward_plus_infinity():
    assert decode_e4m3(encode_e4m3(torch.tensor([-1.01, -1.0, -1.12, -1e-9]), "up")).tolist() == [-1.0, -1.0, -1.0, 0.0]


def test_e8m0_every_byte():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    values = decode_e8m0(bytes_)
    assert values[0] == 2.0**-127 and values[255].isnan()
    assert all(values[b] == 2.0 ** (b - 127) for b in range(255))
    assert torch.equal(values[:255], decode_e8m0(bytes_.view(torch.float8_e8m0fnu))[:255])


def test_pack_nibbles():
    codes = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x8F]]
    everything = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(everything)), everything)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("encode", [encode_e2m1, encode_e4m3, encode_e5m2])
def test_other_dtypes_are_refused(encode, dtype):
    with pytest.raises(TypeError, match=f"{dtype}.*accepted: torch.float32, torch.bfloat16, torch.float16"):
        encode(torch.zeros(4).to(dtype))
