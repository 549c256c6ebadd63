"""docs/numerics.md, 8: relative mean squared errors on N(0,1), 1024x2048, within 1 % of the table."""

import pytest
import torch

from fp4ext.policy.spec import Spec
from fp4ext.reference import decode_e2m1, decode_e4m3, dequantize, encode_e2m1_stochastic, encode_e4m3, quantize, rht
from fp4ext.reference.hadamard import parse
from fp4ext.reference.philox import element_bits

from .data import gaussian

RNG = torch.tensor([7, 3])
TABLE = [
    ("nvfp4/amax", 9.035),
    ("nvfp4/four_over_six", 7.549),
    ("nvfp4/four_over_six_mae", 7.78),
    ("nvfp4/four_over_six_absmax", 7.97),
    ("nvfp4/sweep", 6.69),
    ("nvfp4/amax/nearest/16x16", 12.39),
    ("nvfp4/four_over_six/nearest/16x16", 12.38),
    ("mxfp4/floor", 13.23),
    ("mxfp4/ceil", 13.3),
    ("mxfp8/floor", 0.862),
    ("mxfp8/ceil", 0.705),
    ("nvfp4/amax/stochastic", 22.21),
    ("nvfp4/minvar/stochastic", 18.6),
    ("nvfp4/amax/eden_block/1x16/tensor/128", 9.33),
    ("nvfp4/amax/eden/1x16/tensor/128", 9.76),
    ("nvfp4/sweep/eden/1x16/tensor/128", 7.15),
    ("nvfp4/sweep/eden/1x16/tensor/128x2", 7.15),
]


def relative_mse(y, x):
    return float((y.double() - x.double()).square().sum() / x.double().square().sum())


@pytest.mark.slow
@pytest.mark.parametrize("key,value", TABLE)
def test_table(key, value):
    spec = Spec.parse(key)
    x = gaussian(1024, 2048)
    got = dequantize(*quantize(x, spec, rng=RNG), spec.format, 2048)
    if spec.rht != "none":
        x = rht(x, *parse(spec.rht), RNG)  # the transform keeps lengths, so the error may be taken among the rotated
    assert 1e3 * relative_mse(got, x) == pytest.approx(value, rel=0.01)


def test_headroom_of_16_over_17():
    """The other way not to clip, not offered: values up to 6·16/17, as rounding a scale takes at most 1/17 off it."""
    x = gaussian(1024, 2048)
    blocks = x.unflatten(-1, (-1, 16))
    room = 6 * 16 / 17
    g = x.abs().max() / (room * 448)
    s = decode_e4m3(encode_e4m3(blocks.abs().amax(-1) / (room * g))) * g
    bits = element_bits(RNG, 1024, 2048, 0).view(blocks.shape)
    got = decode_e2m1(encode_e2m1_stochastic(blocks / s[..., None], bits)) * s[..., None]
    assert 1e3 * relative_mse(got, blocks) == pytest.approx(23.57, rel=0.01)
