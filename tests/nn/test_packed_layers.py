"""QuantizedLinear: a layer that holds a QTensor and nothing wider."""

import copy

import pytest
import torch

import fp4ext
from fp4ext import QuantizedExperts, QuantizedLinear, Spec, gemm, grouped_quantize, quantize
from fp4ext.testing import assert_bytes_equal, generate

SWEEP = Spec("nvfp4", "sweep", outer="row")


def weight(format="nvfp4", n=96, k=64, **how):
    return quantize(generate("gaussian", n, k, seed=1, dtype=torch.bfloat16), format, **how)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "mxfp8_e5m2", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_spec", [None, SWEEP, Spec("mxfp8")])
def test_it_is_gemm(format, dtype, x_spec):
    q, bias = weight(format), generate("gaussian", 96)
    layer = QuantizedLinear(q, bias, x_spec)
    x = generate("gaussian", 2, 5, 64, dtype=dtype)
    operand = x.flatten(0, 1) if x_spec is None else quantize(x.flatten(0, 1), x_spec)
    assert_bytes_equal(layer(x), gemm(operand, q, bias, dtype).view(2, 5, 96))
    assert layer(x[0, 0]).shape == (96,) and layer(x[:0]).shape == (0, 5, 96)


def test_half_and_autocast():
    layer = QuantizedLinear(weight(), None, SWEEP)
    x = generate("gaussian", 3, 64)
    assert layer(x.half()).dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert_bytes_equal(layer(x), layer(x.bfloat16()))


@pytest.mark.parametrize("policy, format, x", [
    ("end_to_end", "nvfp4", SWEEP), ("nvidia", "nvfp4", Spec("nvfp4", outer="row")), ("mxfp8", "mxfp8", Spec("mxfp8")),
    ("end_to_end", "mxfp8", None), ("end_to_end", "mxfp4", None), ("bf16", "nvfp4", None),
])  # fmt: skip
def test_its_input_is_quantized_as_the_policys_sampler_does(policy, format, x):
    assert QuantizedLinear.of(weight(format), None, policy).x == x
    assert QuantizedLinear.of(weight(format), None, policy, "lm_head").x is None


def test_it_computes_what_the_converted_layer_does_in_the_samplers_stage():
    """The same bits: a trainer may change places with it."""
    torch.manual_seed(0)
    for policy in ("end_to_end", "four_over_six", "mxfp8"):
        layer = fp4ext.Linear(64, 96, policy=policy)
        recipe = layer.policy.recipe("rl_sampler", "")
        packed = QuantizedLinear.of(quantize(layer.weight, recipe.fprop.w, role="w"), layer.bias, policy)
        x = generate("gaussian", 7, 64, dtype=torch.bfloat16)
        with fp4ext.stage("rl_sampler"), torch.no_grad():
            assert_bytes_equal(packed(x), layer(x), policy)


@pytest.mark.parametrize("format, bits", [("nvfp4", 4.5), ("mxfp4", 4.25), ("mxfp8", 8.25)])
def test_its_size(format, bits):
    layer = QuantizedLinear(weight(format, 256, 1024))
    held = sum(t.nbytes for t in (*layer.buffers(), *layer.parameters()))
    assert 8 * held / (256 * 1024) == pytest.approx(bits, abs=0.001)


@pytest.mark.parametrize("outer", ["tensor", "row"])
def test_dtypes_moves_and_state(outer):
    """A cast changes the bias alone; meta and back, copies and state_dicts keep the bits."""
    q = weight(outer=outer)
    layer = QuantizedLinear(q, torch.ones(96), SWEEP)
    for changed in (copy.deepcopy(layer).bfloat16(), copy.deepcopy(layer).half(), copy.deepcopy(layer).to("cpu")):
        for name, t in changed.weight.tensors().items():
            assert_bytes_equal(t, q.tensors()[name], name)
    assert copy.deepcopy(layer).bfloat16().bias.dtype == torch.bfloat16
    fresh = QuantizedLinear(weight(outer=outer).to("meta"), torch.zeros(96), SWEEP)
    fresh.load_state_dict(layer.state_dict(), assign=True)
    x = generate("gaussian", 3, 64)
    assert_bytes_equal(fresh(x), layer(x))
    assert "nvfp4" in repr(layer) and "bits per weight" in repr(layer)


def test_compiled():
    layer = QuantizedLinear(weight(), torch.ones(96), SWEEP)
    x = generate("gaussian", 3, 64)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


BAD = {
    "weight is Tensor; accepted: a QTensor": (TypeError, lambda: QuantizedLinear(torch.ones(2, 2))),
    "weight has shape (2, 32, 32)": (ValueError, lambda: QuantizedLinear(quantize(torch.ones(2, 32, 32), "nvfp4"))),
    "bias has shape (3,); accepted: (96,)": (ValueError, lambda: QuantizedLinear(weight(), torch.ones(3))),
    "differ in K": (ValueError, lambda: QuantizedLinear(weight())(torch.ones(3, 32))),
    "unknown policy 'x'": (ValueError, lambda: QuantizedLinear.of(weight(), None, "x")),
}


@pytest.mark.parametrize("message", BAD)
def test_refusals(message):
    with pytest.raises(BAD[message][0]) as error:
        BAD[message][1]()
    assert message in str(error.value)


# Experts


def experts(policy="end_to_end", n=3, k=64, f=32):
    torch.manual_seed(0)
    module = fp4ext.Experts(n, k, f, policy=policy, name="m.experts")
    spec = module.recipes["rl_sampler"].fprop.w
    stacks = (grouped_quantize(getattr(module, leaf), spec, role="w") for leaf in ("gate_up_proj", "down_proj"))
    return module, QuantizedExperts.of(*stacks, policy, "m.experts")


@pytest.mark.parametrize("policy", ["end_to_end", "nvidia", "mxfp8"])
def test_packed_experts_compute_what_experts_do_in_the_samplers_stage(policy):
    module, packed = experts(policy)
    offsets = torch.tensor([4, 4, 9], dtype=torch.int32)  # expert 1 has no rows; the last row is unassigned
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = generate("gaussian", 10, 64, dtype=dtype)
        with fp4ext.stage("rl_sampler"), torch.no_grad():
            assert_bytes_equal(packed(x, offsets), module(x, offsets), policy)
        assert not packed(x, offsets)[9].any()


def test_packed_experts_hold_nothing_wider():
    _, packed = experts(n=8, k=256, f=128)
    held = sum(t.nbytes for t in (*packed.buffers(), *packed.parameters()))
    assert held / (8 * 3 * 256 * 128) <= 0.57 and "bits per weight" in repr(packed)
    offsets = torch.tensor([2] * 8, dtype=torch.int32)
    x = generate("gaussian", 2, 256)
    assert_bytes_equal(copy.deepcopy(packed).bfloat16()(x, offsets), packed(x, offsets))


def test_expert_stacks_that_do_not_fit():
    _, packed = experts()
    with pytest.raises(ValueError, match=r"accepted: \[E, 2F, K\] and \[E, K, F\]"):
        QuantizedExperts(packed.down_proj, packed.gate_up_proj)
    with pytest.raises(TypeError, match="down is Tensor; accepted: a QTensor"):
        QuantizedExperts(packed.gate_up_proj, torch.ones(3, 64, 32))
