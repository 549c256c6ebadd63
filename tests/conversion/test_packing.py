"""pack and refit: the bits of the converted model, from codes alone."""

import pytest
import torch
from torch import nn

import fp4ext
from fp4ext import Fprop, Policy, QuantizedExperts, QuantizedLinear, Recipe, Spec
from fp4ext.testing import assert_bytes_equal, generate


def make(policy="end_to_end", bias=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=bias), nn.SiLU(), nn.Linear(96, 40, bias=bias), nn.LayerNorm(40))
    fp4ext.convert(model, policy)
    return model


def forward(model, x, dtype=torch.bfloat16):
    with fp4ext.stage("rl_sampler"), torch.no_grad(), torch.autocast("cpu", dtype, dtype != torch.float32):
        return model(*x) if isinstance(x, tuple) else model(x)


@pytest.mark.parametrize("policy", ["end_to_end", "nvidia", "mxfp8"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits(policy, bias, dtype):
    model, x = make(policy, bias), generate("gaussian", 2, 5, 64)
    packed = fp4ext.pack(model)
    assert type(packed[0]) is QuantizedLinear and not packed.training
    assert_bytes_equal(forward(packed, x, dtype), forward(model, x, dtype))
    assert_bytes_equal(forward(packed, x[0, 0], dtype), forward(model, x[0, 0], dtype))


def test_the_model_stays_and_no_weight_is_copied():
    model = make()
    before = {name: p.clone() for name, p in model.named_parameters()}
    packed = fp4ext.pack(model)
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in model.named_parameters())
    assert isinstance(model[0], fp4ext.Linear) and model.training
    assert sum(p.numel() for p in packed.parameters()) == 2 * 40 + 96 + 40  # the LayerNorm's and the biases
    assert [w.nbytes for w in fp4ext.packed_weights(packed)] == [64 * 96 * 9 // 16 + 4, 96 * 40 * 9 // 16 + 4]


def test_refit_is_in_place_and_exact():
    model, x = make(), generate("gaussian", 7, 64)
    packed = fp4ext.pack(model)
    places = lambda: [t.data_ptr() for t in (packed[0].weight.codes, packed[2].weight.scales, packed[3].weight)]  # noqa: E731
    before = places()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape))
    wanted = forward(model, x)
    assert not torch.equal(forward(packed, x), wanted)
    fp4ext.refit(packed, model)
    assert_bytes_equal(forward(packed, x), wanted)
    assert places() == before


def test_layers_that_stay_are_copied():
    model = make(Policy("mine", Recipe(Fprop(Spec("nvfp4"), Spec("nvfp4"))), keep=("2",)))
    packed = fp4ext.pack(model)
    assert type(packed[2]) is nn.Linear and packed[2].weight is not model[2].weight


def test_refusals():
    with pytest.raises(ValueError, match="unknown stage 'sampler'"):
        fp4ext.pack(make(), "sampler")
    noisy = Recipe(Fprop(Spec("nvfp4", rounding="stochastic"), Spec("nvfp4", rounding="stochastic")))
    with pytest.raises(ValueError, match="is random .*; accepted: one that rounds weights to nearest"):
        fp4ext.pack(make(Policy("noisy", noisy)))
    with pytest.raises(ValueError, match="the model has no '2'; accepted: the model that was packed"):
        fp4ext.refit(fp4ext.pack(make()), make()[:2])


# Experts


class Mixture(nn.Module):
    def __init__(self, policy="end_to_end"):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.experts = nn.LayerNorm(64), fp4ext.Experts(5, 64, 32, policy=policy)

    def forward(self, x, offsets):
        return self.experts(self.norm(x), offsets)


OFFSETS = torch.tensor([3, 3, 10, 11, 20], dtype=torch.int32)


@pytest.mark.parametrize("policy", ["end_to_end", "nvidia", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_give_the_same_bits(policy, dtype):
    model, x = Mixture(policy), generate("gaussian", 22, 64)
    packed = fp4ext.pack(model)
    assert type(packed.experts) is QuantizedExperts
    run = lambda m: forward(lambda x: m(x, OFFSETS), x, dtype)  # noqa: E731
    assert_bytes_equal(run(packed), run(model))
    places = [t.data_ptr() for t in packed.experts.gate_up_proj.tensors().values()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    assert not torch.equal(run(packed), run(model))
    fp4ext.refit(packed, model)
    assert_bytes_equal(run(packed), run(model))
    assert [t.data_ptr() for t in packed.experts.gate_up_proj.tensors().values()] == places


def test_packed_experts_are_small():
    """4.5 bits per weight and an outer scale an expert and matrix; no parameter is left."""
    packed = fp4ext.pack(Mixture()).experts
    weights = 5 * 3 * 64 * 32
    assert sum(w.nbytes for w in packed.weights) == weights * 9 // 16 + 2 * 5 * 4
    assert not list(packed.parameters()) and "4.51 bits" in repr(packed)
    assert type(fp4ext.pack(Mixture("bf16")).experts) is fp4ext.Experts


def test_hooks_stay_where_they_are():
    """A packed layer's forward is seen, and changed, as the layer's own was."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 32))
    fp4ext.convert(model, "end_to_end")
    seen = []
    model[0].register_forward_pre_hook(lambda module, given: seen.append(type(module).__name__))
    model[1].register_forward_hook(lambda module, given, y: y + 1)
    x = generate("gaussian", 4, 64)
    with fp4ext.stage("rl_sampler"), torch.no_grad():
        assert_bytes_equal(fp4ext.pack(model)(x), model(x))
    assert seen == ["QuantizedLinear", "Linear"]


def test_a_packed_model_is_not_saved_without_its_formats(tmp_path):
    """save_pretrained would write codes that nothing describes; the model itself is saved as before."""
    transformers = pytest.importorskip("transformers")
    size = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    m = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_key_value_heads=2, head_dim=16))
    fp4ext.convert(m)
    packed = fp4ext.pack(m)
    with pytest.raises(NotImplementedError, match="fp4ext.export.save"):
        packed.save_pretrained(tmp_path / "packed")
    m.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "packed").exists() and (tmp_path / "plain" / "model.safetensors").exists()
    fp4ext.export.save(packed, tmp_path / "out", progress=False)
