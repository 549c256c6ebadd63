"""The face of quantize and dequantize: shapes, dtypes, axes, padding, strides, refusals."""

import pytest
import torch

from fp4ext import formats
from fp4ext.policy.spec import Spec
from fp4ext.reference import amax_of, dequantize, quantize

from .data import gaussian, same, wide

RNG = torch.tensor([3, 4])
KEYS = [
    "nvfp4",
    "nvfp4/sweep/nearest/1x16/row",
    "nvfp4/four_over_six/nearest/16x16",
    "nvfp4/amax/nearest/1x16/pow2/16",
    "nvfp4/minvar/stochastic",
    "nvfp4/amax/stochastic/1x16/tensor/128",
    "nvfp4/sweep/eden/1x16/tensor/128x2",
    "nvfp4/amax/eden_block/1x16/tensor/128",
    "mxfp8",
    "mxfp8_e5m2/ceil/stochastic",
    "mxfp4/floor",
    "mxfp4/ceil/stochastic/1x32/none/32",
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("shape", [(1, 80), (5, 40), (2, 3, 64), (2, 2, 3, 33), (0, 64), (3, 0), (7, 1)])
@pytest.mark.parametrize("axis", [-1, -2])
def test_shapes_dtypes_and_padding(shape, axis, key):
    spec = Spec.parse(key)
    fmt = spec.fmt
    x = gaussian(*shape)
    codes, scales, g = quantize(x, spec, axis, RNG)
    view = x if axis == -1 else x.mT
    padded = fmt.padded(view.shape[-1])
    assert codes.shape == (*view.shape[:-1], padded // fmt.codes_per_byte) and codes.dtype == fmt.codes_dtype
    assert scales.shape == (*view.shape[:-1], padded // fmt.block) and scales.dtype == fmt.scale_dtype
    assert g.dtype == torch.float32
    assert g.shape == {"row": (*view.shape[:-1], 1), "none": (0,)}.get(spec.outer, ())
    assert torch.equal(amax_of(x, spec, axis, RNG).isfinite(), g.isfinite())
    y = dequantize(codes, scales, g, fmt, view.shape[-1])
    assert y.shape == view.shape and y.isfinite().all()
    if spec.rht == "none" and x.numel():
        assert float((y - view).norm() / view.norm()) < 0.3
        filled = torch.nn.functional.pad(view, (0, padded - view.shape[-1]))
        assert same(
            quantize(filled, spec, -1, RNG) if spec.rounding == "nearest" else (codes, scales, g), (codes, scales, g)
        )


@pytest.mark.parametrize("key", KEYS)
def test_strides_do_not_matter(key):
    x = gaussian(48, 128)
    want = quantize(x, key, -1, RNG)
    assert same(quantize(x.T.contiguous().T, key, -1, RNG), want)
    assert same(quantize(torch.stack([x, -x], -1)[..., 0], key, -1, RNG), want)
    assert same(quantize(x[:1].expand(48, 128), key, -1, RNG), quantize(x[:1].repeat(48, 1), key, -1, RNG))


@pytest.mark.parametrize("key", [k for k in KEYS if Spec.parse(k).rounding == "nearest"])
def test_axis_2_is_the_transpose(key):
    x = wide(2, 48, 80)
    if "16x16" not in key:  # a tile sums in the order of x, whichever the axis
        assert same(quantize(x, key, -2, RNG), quantize(x.mT, key, -1, RNG))


@pytest.mark.parametrize("key", [k for k in KEYS if "16x16" not in k])
def test_a_vector_is_one_row(key):
    x = gaussian(1, 128)
    flat, row = quantize(x[0], key, -1, RNG), quantize(x, key, -1, RNG)
    assert torch.equal(flat[0].view(torch.uint8), row[0][0].view(torch.uint8))
    assert torch.equal(flat[1].view(torch.uint8), row[1][0].view(torch.uint8))
    assert torch.equal(flat[2].flatten(), row[2].flatten())


@pytest.mark.parametrize("key", KEYS)
def test_half_inputs_are_their_fp32_values(key):
    for dtype in (torch.bfloat16, torch.float16):
        x = gaussian(4, 128).to(dtype)
        assert same(quantize(x, key, -1, RNG), quantize(x.float(), key, -1, RNG))


@pytest.mark.parametrize("key", KEYS)
def test_does_not_write_to_its_input(key):
    x = gaussian(4, 128)
    x[1, 1] = torch.nan
    before = x.clone()
    quantize(x, key, -1, RNG)
    assert torch.equal(x.nan_to_num(9), before.nan_to_num(9))


def test_same_rng_same_bytes_and_every_part_of_it_matters():
    x = gaussian(16, 128)
    key = "nvfp4/minvar/stochastic"
    first = quantize(x, key, -1, RNG)
    assert same(quantize(x, key, -1, RNG.clone()), first)
    others = [
        quantize(x, key, -1, torch.tensor([3, 5])),
        quantize(x, key, -1, torch.tensor([4, 4])),
        quantize(x, key, -1, torch.tensor([3, 4, 1, 0])),
        quantize(x, key, -1, torch.tensor([3, 4, 0, 16])),
        quantize(x, key, -1, RNG, role="w"),
        quantize(x, key, -1, RNG, role=2),
    ]
    assert all(not torch.equal(o[0], first[0]) for o in others)
    assert same(quantize(x, key, -1, RNG, role="w"), quantize(x, key, -1, RNG, role=1))


def test_decoding_is_one_product_of_scales():
    x = gaussian(4, 64)
    codes, scales, g = quantize(x, "nvfp4/amax/nearest/1x16/row")
    q = dequantize(codes, torch.full_like(scales.float(), 1.0).to(scales.dtype), None, "nvfp4", 64)
    want = q * (scales.float() * g).repeat_interleave(16, -1)
    assert torch.equal(dequantize(codes, scales, g, formats.NVFP4, 64), want)
    assert torch.equal(dequantize(codes, scales, g, "nvfp4", 50, torch.bfloat16), want[:, :50].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int8, torch.bool, torch.complex64])
def test_dtypes_refused(dtype):
    with pytest.raises(TypeError, match=f"{dtype}; accepted: torch.float32, torch.bfloat16, torch.float16"):
        quantize(torch.zeros(2, 32).to(dtype), "nvfp4")


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda: quantize(gaussian(64), "nvfp4", axis=-2), "at least 2 dimensions"),
        (lambda: quantize(torch.tensor(1.0), "nvfp4"), "scalar"),
        (lambda: quantize(gaussian(2, 64), "nvfp4", axis=0), "-1 or -2"),
        (lambda: quantize(gaussian(2, 64), "nvfp4/amax/nearest/1x16/expert"), "3-D"),
        (lambda: quantize(gaussian(2, 64), "nvfp4/amax/stochastic"), "rng"),
        (lambda: quantize(gaussian(2, 64), "nvfp4/amax/nearest/1x16/tensor/16"), "rng"),
        (lambda: quantize(gaussian(2, 64), "nvfp4/amax/nearest/16x16/row"), "row"),
    ],
)
def test_refusals_say_why(call, words):
    with pytest.raises(ValueError, match=words):
        call()
