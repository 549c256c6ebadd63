"""quantize, the function that users call: its defaults, its arguments, its refusals. The bits are tests/ops/'s."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4ext
from fp4ext import Spec, formats, quantize, reference
from fp4ext.functional import ops
from fp4ext.testing import assert_same_quantized, generate

SR = Spec("nvfp4", rounding="stochastic")


def parts(q):
    return q.codes, q.scales, torch.empty(0) if q.global_scale is None else q.global_scale


def same(a, b):
    assert_same_quantized(parts(a), parts(b))
    assert (a.shape, a.dtype, a.format) == (b.shape, b.dtype, b.format)


@pytest.fixture
def x():
    return generate("student_t3", 32, 96)


def test_defaults(x):
    q = quantize(x)
    assert (q.format, q.shape, q.dtype) == (formats.NVFP4, x.shape, x.dtype)
    assert (q.codes.dtype, q.codes.shape) == (torch.uint8, (32, 48))
    assert (q.scales.dtype, q.scales.shape) == (torch.float8_e4m3fn, (32, 6))
    assert (q.global_scale.dtype, q.global_scale.shape) == (torch.float32, ())
    same(q, quantize(x, "nvfp4", scale="amax", rounding="nearest", block="1x16", outer="tensor", rht=None, axis=-1))
    for name in ("mxfp8", "mxfp8_e5m2", "mxfp4"):
        q, fmt = quantize(x, name), formats.get(name)
        assert (q.codes.dtype, q.scales.dtype, q.global_scale) == (fmt.codes_dtype, torch.float8_e8m0fnu, None)
        assert q.codes.shape == (32, 96 // fmt.codes_per_byte) and q.scales.shape == (32, 3)
        same(q, quantize(x, name, scale="ceil"))


@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_format_may_be_a_name_an_object_or_a_spec(name, x):
    same(quantize(x, name), quantize(x, formats.get(name)))
    same(quantize(x, name), quantize(x, Spec(name)))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(
        ["nvfp4/sweep", "nvfp4/amax/stochastic/1x16/row/16", "nvfp4/sweep/eden/1x16/tensor/128x2", "mxfp8"]
    ),
    st.lists(st.integers(0, 24), min_size=2, max_size=4),
    st.sampled_from([-1, -2]),
    st.sampled_from(["x", "w", "dy"]),
    st.integers(-(2**63), 2**63 - 1),
)
def test_it_passes_on_what_it_is_given(key, shape, axis, role, seed):
    """Against the reference: axis, role, seed; and the logical shape is that of x, or of its transpose."""
    x = generate("gaussian", *shape)
    q = quantize(x, Spec.parse(key), axis=axis, role=role, rng=seed)
    wanted = reference.quantize(x, Spec.parse(key), axis, torch.tensor([seed, 0]), role)
    assert_same_quantized(parts(q), wanted)
    assert q.shape == (x.shape if axis == -1 else x.mT.shape)


def test_axis_minus_two_is_the_transpose(x):
    same(quantize(x, axis=-2), quantize(x.T))
    stacked = generate("gaussian", 3, 20, 40)
    same(quantize(stacked, "mxfp8", axis=-2), quantize(stacked.mT, "mxfp8"))


def test_rng(x):
    """An int is {seed, 0}; None draws from torch's generator, once, and only if something is random."""
    same(quantize(x, SR, rng=5), quantize(x, SR, rng=torch.tensor([5, 0])))
    same(quantize(x, SR, rng=torch.tensor([5, 9])), quantize(x, SR, rng=torch.tensor([5, 9, 0, 0])))
    torch.manual_seed(3)
    drawn = quantize(x, SR)
    torch.manual_seed(3)
    same(drawn, quantize(x, SR, rng=ops.draw_rng(x, 1)[0]))
    others = [quantize(x, SR), quantize(x, SR, rng=5), quantize(x, SR, rng=torch.tensor([5, 1]))]
    assert len({q.codes.numpy().tobytes() for q in [drawn, *others]}) == 4
    state = torch.get_rng_state()
    same(quantize(x), quantize(x, rng=5))
    assert torch.equal(torch.get_rng_state(), state)


def test_roles_have_bits_of_their_own(x):
    assert len({quantize(x, SR, rng=5, role=role).codes.numpy().tobytes() for role in ("x", "w", "dy")}) == 3


@pytest.mark.parametrize("outer, shape", [("tensor", ()), ("pow2", ()), ("row", (32, 1)), ("row_pow2", (32, 1))])
def test_amax(outer, shape, x):
    """What the tensor's own amax gives; a larger one leaves room."""
    own = ops.amax(x, Spec(outer=outer).key)
    assert own.shape == shape
    same(quantize(x, outer=outer, amax=own), quantize(x, outer=outer))
    larger = quantize(x, outer=outer, amax=own * 4)
    assert torch.equal(larger.global_scale, quantize(x, outer=outer).global_scale * 4)


def test_no_gradient_flows(x):
    q = quantize(x.requires_grad_())
    assert not any(t.requires_grad for t in (*q.tensors().values(), q.dequantize()))


def test_meta_tensors_have_the_right_shapes(x):
    for spec in (Spec(), SR.with_(outer="row"), Spec("mxfp4")):
        q, on_meta = quantize(x, spec), quantize(x.to("meta"), spec)
        assert all(t.device.type == "meta" for t in on_meta.tensors().values())
        assert {n: (t.shape, t.dtype) for n, t in q.tensors().items()} == {
            n: (t.shape, t.dtype) for n, t in on_meta.tensors().items()
        }


def test_compiled():
    def f(x):
        return quantize(x.sin(), "nvfp4", scale="sweep", axis=-2).dequantize() * 2

    x = generate("gaussian", 20, 48)
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))


BAD = {
    "x is torch.float64; accepted: float32, bfloat16, float16 (rounding float64 twice is not": (
        TypeError, lambda x: quantize(x.double())),
    "x is torch.int64; accepted: float32, bfloat16, float16": (TypeError, lambda x: quantize(x.long())),
    "x is torch.bool": (TypeError, lambda x: quantize(x > 0)),
    "x is torch.complex64": (TypeError, lambda x: quantize(x + 1j)),
    "x is list; accepted: a torch.Tensor": (TypeError, lambda x: quantize(x.tolist())),
    "amax is given beside a QTensor": (ValueError, lambda x: quantize(quantize(x), amax=torch.ones(()))),
    "unknown format 'fp5'; formats: nvfp4, mxfp8, mxfp8_e5m2, mxfp4": (ValueError, lambda x: quantize(x, "fp5")),
    "unknown format None; formats: nvfp4": (ValueError, lambda x: quantize(x, None)),
    "unknown scale rule for nvfp4: 'floor'; accepted: amax, four_over_six": (
        ValueError, lambda x: quantize(x, scale="floor")),
    "unknown rounding: 'up'; accepted: nearest, stochastic, eden, eden_block": (
        ValueError, lambda x: quantize(x, rounding="up")),
    "scale='sweep', rounding='stochastic' beside the whole spec mxfp8/ceil": (
        ValueError, lambda x: quantize(x, Spec("mxfp8"), scale="sweep", rounding="stochastic")),
    "unknown role 'y'; accepted: x, w, dy": (ValueError, lambda x: quantize(x, role="y")),
    "axis is 0; accepted: -1 (along the last axis), -2": (ValueError, lambda x: quantize(x, axis=0)),
    "axis is 1; accepted: -1": (ValueError, lambda x: quantize(x, axis=1)),
    "x has 0 dimensions; accepted: at least 1": (RuntimeError, lambda x: quantize(x[0, 0])),
    "x has 1 dimensions; accepted: at least 2 with axis=-2": (RuntimeError, lambda x: quantize(x[0], axis=-2)),
    "accepted with outer='expert': 3": (RuntimeError, lambda x: quantize(x, outer="expert")),
    "rng is str; accepted: None, an int or an int64 tensor {seed, offset}": (
        TypeError, lambda x: quantize(x, rng="seed")),
    "rng is float; accepted: ": (TypeError, lambda x: quantize(x, SR, rng=1.0)),
    "rng is 9223372036854775808; accepted: a seed of 64 bits": (ValueError, lambda x: quantize(x, SR, rng=2**63)),
    "rng is on meta; accepted: cpu": (
        ValueError, lambda x: quantize(x, SR, rng=torch.zeros(2, dtype=torch.int64, device="meta"))),
    "rng is int32; accepted: int64": (
        RuntimeError, lambda x: quantize(x, SR, rng=torch.zeros(2, dtype=torch.int32))),
    "rng has shape [3]; accepted: [2] {seed, offset} or [4]": (
        RuntimeError, lambda x: quantize(x, SR, rng=torch.zeros(3, dtype=torch.int64))),
    "amax has shape [2]; accepted: []": (RuntimeError, lambda x: quantize(x, amax=torch.ones(2))),
    "amax is float64; accepted: float32": (RuntimeError, lambda x: quantize(x, amax=torch.ones(()).double())),
    "amax is on meta; accepted: cpu": (ValueError, lambda x: quantize(x, amax=torch.ones((), device="meta"))),
    "amax is given, but this format has no outer scale": (
        RuntimeError, lambda x: quantize(x, "mxfp8", amax=torch.ones(()))),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD, ids=lambda m: m)
def test_refusals(message, x):
    with pytest.raises(BAD[message][0]) as error:
        BAD[message][1](x)
    assert message in str(error.value)


def test_it_is_public():
    assert fp4ext.quantize is quantize


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_qtensor_is_quantized_from_its_values(x, axis):
    q = quantize(x, "nvfp4", scale="sweep")
    got = quantize(q, "mxfp8", axis=axis)
    same(got, quantize(q.dequantize(torch.float32), "mxfp8", axis=axis))
    assert got.dtype == x.dtype
