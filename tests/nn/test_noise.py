"""gradient_noise: a ratio that means what it says, and a warning that names the layers."""

import math
import warnings

import pytest
import torch

import fp4ext
from fp4ext import gradient_noise
from fp4ext.nn.noise import SQRT3


@pytest.fixture
def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.SiLU(), torch.nn.Linear(256, 64))


def test_it_agrees_with_many_draws(model):
    """Against the noise around the mean of 64 backward passes."""
    fp4ext.convert(model, "nvidia")
    x = torch.randn(256, 128)
    loss = lambda: model(x).square().mean()  # noqa: E731
    ratios = gradient_noise(model, loss, warn=False)
    weights = {"0": model[0].weight, "2": model[2].weight}
    draws = [torch.autograd.grad(loss(), list(weights.values())) for _ in range(64)]
    for i, name in enumerate(weights):
        g = torch.stack([d[i] for d in draws]).double()
        wanted = g.mean(0).norm() / (g.var(0).sum().sqrt())
        assert ratios[name] == pytest.approx(wanted.item(), rel=0.1)
    assert all(p.grad is None for p in model.parameters())


def test_no_noise_is_infinitely_good(model):
    fp4ext.convert(model, "mxfp8")
    x = torch.randn(64, 128)
    assert set(gradient_noise(model, lambda: model(x).sum()).values()) == {math.inf}


def test_it_warns_of_drowned_gradients(model):
    """Each token twice, pulled both ways: the gradient cancels, the noise of its rounding does not."""
    fp4ext.convert(model, "nvidia")
    x, pull = torch.randn(256, 128).repeat(2, 1), torch.randn(256, 64)
    pull = torch.cat((pull, -pull))
    with pytest.warns(UserWarning, match=r"outweighs the gradient .* in 2 of 2 layers: \d 0\.\d\d, "):
        ratios = gradient_noise(model, lambda: (model(x) * pull).sum())
    assert max(ratios.values()) < SQRT3


def test_it_keeps_quiet_about_sound_gradients(model):
    fp4ext.convert(model, "end_to_end")
    x = torch.randn(256, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert min(gradient_noise(model, lambda: model(x).square().mean()).values()) > SQRT3


def test_a_plain_model_is_refused(model):
    with pytest.raises(ValueError, match="no converted layer"):
        gradient_noise(model, lambda: model(torch.randn(4, 128)).sum())


def test_experts_are_layers_too():
    """Each of their two stacks; what no gradient reaches is left out."""
    experts = fp4ext.Experts(2, 64, 32, policy="nvidia")
    offsets = torch.tensor([24, 64], dtype=torch.int32)
    x = torch.randn(64, 64)
    loss = lambda: experts(x, offsets).square().mean()  # noqa: E731
    assert set(gradient_noise(experts, loss, warn=False)) == {"gate_up_proj", "down_proj"}
    experts.down_proj.requires_grad_(False)
    (ratio,) = gradient_noise(torch.nn.ModuleDict({"mlp": experts}), loss, warn=False).items()
    assert ratio[0] == "mlp.gate_up_proj" and 1 < ratio[1] < 100
