"""Derivatives that fp4ext's products do not have raise; none is silently zero. What they cost is counted."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import fp4ext


def packed_linear():
    base = nn.Sequential(nn.Linear(64, 48))
    fp4ext.convert(base)
    return fp4ext.pack(base)[0]


def offsets():
    return torch.tensor([3, 8], dtype=torch.int32)


def experts():
    m = fp4ext.Experts(2, 64, 32)
    return lambda x: m(x, offsets())


def packed_experts():
    m = fp4ext.pack(nn.Sequential(fp4ext.Experts(2, 64, 32)))[0]
    return lambda x: m(x, offsets())


LAYERS = {
    "Linear": lambda: fp4ext.Linear(64, 48),
    "mxfp8": lambda: fp4ext.Linear(64, 48, policy="mxfp8"),
    "Experts": experts,
    "QuantizedLinear": packed_linear,
    "QuantizedExperts": packed_experts,
}
TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap": lambda f, x: torch.vmap(f)(x[None]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "trace": lambda f, x: torch.jit.trace(f, x, check_trace=False),
    "hessian": lambda f, x: torch.autograd.functional.hessian(lambda x: f(x).square().sum(), x),
    "second derivative": lambda f, x: torch.autograd.grad(f(x.requires_grad_()).sum(), x, create_graph=True),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_what_has_no_rule_raises(layer, transform):
    with pytest.raises(NotImplementedError, match="accepted:"):
        TRANSFORMS[transform](LAYERS[layer](), torch.randn(8, 64))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_forward_mode_raises(layer, grad):
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        x = forward_ad.make_dual(torch.randn(8, 64), torch.randn(8, 64))
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            LAYERS[layer]()(x)
        LAYERS[layer]()(torch.randn(8, 64))  # one without a tangent


@pytest.mark.parametrize("policy", ["bf16", "mxfp8", "nvidia", "end_to_end"])
def test_operations_are_counted_as_those_of_a_plain_layer(policy):
    def count(m, *given):
        with FlopCounterMode(display=False) as counter:
            m(torch.randn(8, 64, requires_grad=True), *given).sum().backward()
        return counter.get_total_flops()

    assert count(fp4ext.Linear(64, 48, policy=policy)) == count(nn.Linear(64, 48)) == 3 * 2 * 8 * 64 * 48
    if policy != "bf16":
        assert count(fp4ext.Experts(2, 64, 32, policy=policy), offsets()) == 3 * 2 * 8 * 64 * (2 * 32 + 32)


def test_linear_on_meta():
    for policy in ("bf16", "mxfp8", "end_to_end"):
        m = fp4ext.Linear(64, 48, device="meta", policy=policy)
        y = m(torch.randn(3, 64, device="meta"))
        y.sum().backward()
        assert y.shape == (3, 48) and y.device.type == "meta" and m.weight.grad.shape == (48, 64)


def test_a_plain_layer_takes_the_inputs_that_a_quantized_one_takes():
    """A BF16 input beside fp32 master weights, without autocast."""
    for policy in ("bf16", "end_to_end"):
        m, x = fp4ext.Linear(64, 48, policy=policy), torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
        y = m(x)
        y.sum().backward()
        assert y.dtype == x.grad.dtype == torch.bfloat16 and m.weight.grad.dtype == torch.float32
