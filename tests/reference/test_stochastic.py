"""docs/numerics.md, 5: the probabilities, exactly, by running through all 65536 random values."""

import pytest
import torch

from fp4ext import formats
from fp4ext.reference import (
    decode_e2m1,
    decode_e4m3,
    decode_e5m2,
    encode_e2m1_stochastic,
    encode_e4m3_stochastic,
    encode_e5m2_stochastic,
    quantize,
    unpack_nibbles,
)

from .data import gaussian

EVERY_RANDOM = torch.arange(65536)
ELEMENTS = {
    "e2m1": (encode_e2m1_stochastic, decode_e2m1, formats.E2M1, 8),
    "e4m3": (encode_e4m3_stochastic, decode_e4m3, formats.E4M3, 127),
    "e5m2": (encode_e5m2_stochastic, decode_e5m2, formats.E5M2, 124),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_probability_of_up_is_the_fraction(name):
    encode, decode, element, count = ELEMENTS[name]
    values = decode(torch.arange(count, dtype=torch.uint8))
    fraction = torch.rand(count - 1, generator=torch.Generator().manual_seed(0))
    fraction[: (count - 1) // 3] = torch.tensor([1e-6, 1 - 1e-6, 0.5])[torch.arange((count - 1) // 3) % 3]
    x = values[:-1] + fraction * (values[1:] - values[:-1])
    for i, v in enumerate(x):
        true = float((v.double() - values[i].double()) / (values[i + 1].double() - values[i].double()))
        sign = 1 - 2 * (i % 2)
        got = decode(encode((sign * v).expand(65536), EVERY_RANDOM))
        up = got == sign * values[i + 1]
        assert ((got == sign * values[i]) | up).all(), v  # the two neighbours only
        assert abs(float(up.double().mean()) - true) <= 2.0**-17 + 1e-12, (v, true)


@pytest.mark.parametrize("name", ELEMENTS)
def test_representable_values_never_move(name):
    encode, decode, element, count = ELEMENTS[name]
    codes = torch.arange(count, dtype=torch.uint8)
    minus = 8 if name == "e2m1" else 0x80
    for random in (0, 1, 32767, 32768, 65534, 65535):
        r = torch.full((count,), random)
        assert torch.equal(encode(decode(codes), r), codes)
        assert torch.equal(encode(-decode(codes), r), codes | minus)


@pytest.mark.parametrize("name", ELEMENTS)
def test_saturates(name):
    encode, decode, element, count = ELEMENTS[name]
    x = torch.tensor([element.max, element.max * (1 + 2**-22), element.max * 2, 3e38, torch.inf])
    for random in (0, 65535):
        assert (encode(x, torch.full((5,), random)) == count - 1).all()


def test_mean_over_all_random_values_is_exact():
    """The half bin: without it every mean would lie 2^-17 of a step low."""
    v = torch.arange(0, 6, 3 / 64)
    mean = torch.stack([decode_e2m1(encode_e2m1_stochastic(x.expand(65536), EVERY_RANDOM)).double().mean() for x in v])
    assert torch.equal(mean, v.double())


def test_rows_and_columns_do_not_share_bits():
    """Symmetric x, so equal scales; row and column codes agree no more than by chance."""
    x = gaussian(128, 128)
    x = x + x.T
    key = "nvfp4/amax/stochastic/16x16"
    rowwise = quantize(x, key, -1, torch.tensor([1, 2]))
    colwise = quantize(x, key, -2, torch.tensor([1, 2]))
    again = quantize(x, key, -1, torch.tensor([1, 3]))
    assert torch.equal(rowwise[1].view(torch.uint8), colwise[1].view(torch.uint8))
    a, b, c = (unpack_nibbles(t[0]) for t in (rowwise, colwise, again))
    by_chance = float((a == c).double().mean())
    agree = float((a == b).double().mean())
    assert agree < 1 and abs(agree - by_chance) < 5 * (0.25 / a.numel()) ** 0.5 * 2**0.5
    assert abs(float((a == b.T).double().mean()) - by_chance) < 5 * (0.25 / a.numel()) ** 0.5 * 2**0.5


def test_constant_matrix():
    """64x64 of 2.3."""
    x = torch.full((64, 64), 2.3)
    codes, scales, g = quantize(x, "nvfp4/minvar/stochastic", rng=torch.tensor([1, 2]))
    assert codes.any() and scales.view(torch.uint8).all() and float(g) > 0


@pytest.mark.parametrize(
    "key",
    [
        "nvfp4/amax/stochastic",
        "nvfp4/minvar/stochastic",
        "mxfp8/ceil/stochastic",
        "mxfp4/ceil/stochastic",
        "mxfp8_e5m2/ceil/stochastic",
    ],
)
def test_scales_never_clip(key):
    """|x|·enc stays within fp32 rounding of the largest element, so that rounding can stay unbiased."""
    x = torch.cat([gaussian(64, 256), gaussian(64, 256).exp()])
    codes, scales, g = quantize(x, key, rng=torch.tensor([0, 0]))
    fmt = formats.get(key.split("/")[0])
    s = scales.float() * (g if g.numel() else 1.0)
    block_amax = x.unflatten(-1, (-1, fmt.block)).abs().amax(-1)
    assert (block_amax <= fmt.element.max * s * (1 + 2.0**-21)).all()
