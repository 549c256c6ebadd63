"""convert: an ordinary model before, an ordinary model after, and a report that leaves nothing unsaid."""

import copy
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fp4ext
from fp4ext import Policy, Recipe, Spec, convert, policies, revert
from fp4ext.testing import assert_bytes_equal


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(32, 50)

    def forward(self, tokens):
        return self.lm_head(self.layers(self.embed(tokens)))


LAYERS = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
TOKENS = torch.arange(48).reshape(2, 24)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def converted(model):
    return [name for name, module in model.named_modules() if type(module) is fp4ext.Linear]


def output(model, seed=3):
    torch.manual_seed(seed)
    return model(TOKENS)


def test_the_linear_layers_are_converted(model):
    report = convert(model, "nvidia")
    assert report.policy == "nvidia" and report.converted == LAYERS == converted(model)
    assert list(report.left) == ["embed", "lm_head"]
    assert [model.get_submodule(name).policy_name for name in LAYERS] == LAYERS


def test_end_to_end_is_the_default(model):
    assert convert(model).policy == "end_to_end" == model.layers[0].up.policy.name


def test_parameters_and_modules_stay_the_same_objects(model):
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    convert(model, "nvidia")
    for name, module in model.named_modules(remove_duplicate=False):
        assert module is modules[name]
    for name, p in model.named_parameters():
        assert p is parameters[name] and type(p) is nn.Parameter
    assert not list(model.buffers())


def test_optimizers_do_not_notice(model):
    optimizer = torch.optim.AdamW(model.parameters())
    output(model).square().mean().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    convert(model, "end_to_end")
    for a, b in zip(before["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    weight = model.layers[0].up.weight.clone()
    output(model).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.layers[0].up.weight, weight)


def test_hooks_and_modes_are_kept(model):
    calls = []
    up = model.layers[0].up
    up.register_forward_hook(lambda *_: calls.append("forward"))
    up.register_full_backward_hook(lambda *_: calls.append("backward"))
    up.weight.register_hook(lambda g: calls.append("weight"))
    up.weight.requires_grad_(True)
    model.layers[1].up.weight.requires_grad_(False)
    model.eval()
    convert(model, "nvidia")
    output(model).sum().backward()
    assert sorted(calls) == ["backward", "forward", "weight"] and not model.layers[0].up.training
    assert model.layers[1].up.weight.grad is None


# state_dict


@pytest.mark.parametrize("policy", ["nvidia", "end_to_end"])
def test_strict_loading_both_ways(model, policy):
    """Through torch.save and weights_only=True: no keys, buffers or classes that a plain model lacks."""
    plain = copy.deepcopy(model)
    convert(model, policy)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for source, target in ((model, plain), (plain, model)):
        with torch.no_grad():
            for p in source.parameters():
                p.add_(1)
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True), strict=True)
        for (name, a), b in zip(source.state_dict().items(), target.state_dict().values(), strict=True):
            assert_bytes_equal(b, a, name)


def test_meta_device_then_load(model):
    """Converted on the meta device, to_empty, loaded: there was nothing else to initialise."""
    with torch.device("meta"):
        empty = Model()
    convert(empty, "nvidia")
    empty.to_empty(device="cpu").load_state_dict(model.state_dict(), strict=True)
    convert(model, "nvidia")
    assert_bytes_equal(output(empty), output(model))


# The report


class Special(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def zoo():
    """One of each kind that cannot be converted, and two that can."""
    m = nn.Module()
    m.embed, m.conv, m.special = nn.Embedding(8, 16), nn.Conv2d(3, 4, 3), Special(16, 16)
    m.attention = nn.MultiheadAttention(16, 2)
    m.bilinear, m.lazy = nn.Bilinear(4, 4, 4), nn.LazyLinear(4)
    m.double = nn.Linear(16, 16).double()
    m.tied, m.tied_too = nn.Linear(16, 8), nn.Linear(16, 8)
    m.tied_too.weight = m.tied.weight
    m.readout = nn.Linear(16, 8, bias=False)
    m.readout.weight = m.embed.weight
    m.patched = nn.Linear(16, 16)
    m.patched.forward = m.patched.forward
    m.lm_head = nn.Linear(16, 8)
    m.norm, m.act = nn.LayerNorm(16), nn.GELU()
    m.parametrized = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    m.normed = torch.nn.utils.spectral_norm(nn.Linear(16, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have the new form
        m.weight_normed = torch.nn.utils.weight_norm(nn.Linear(16, 16))
    m.pruned = prune.random_unstructured(nn.Linear(16, 16), "weight", 0.5)
    m.good = nn.Linear(16, 16)
    return m


def test_what_is_left_and_why():
    report = convert(zoo(), "nvidia")
    assert report.converted == ["good"]
    for name, why in {
        "embed": "Embedding has no 4-bit form here",
        "conv": "Conv2d has no 4-bit form here",
        "special": "Special is a subclass of nn.Linear, and may compute something else",
        "attention": "MultiheadAttention has no 4-bit form here",
        "attention.out_proj": "NonDynamicallyQuantizableLinear is a subclass of nn.Linear",
        "bilinear": "Bilinear has no 4-bit form here",
        "lazy": "LazyLinear has no shape yet: run a batch through the model first",
        "double": "its weight is torch.float64; accepted: float32, bfloat16, float16",
        "tied": "it shares its weight with tied_too",
        "tied_too": "it shares its weight with tied",
        "readout": "it shares its weight with embed",
        "patched": "its forward is replaced on the object",
        "lm_head": "the policy keeps modules of this name in BF16",
        "parametrized": "ParametrizedLinear is a subclass of nn.Linear",
        "normed": "its weight is computed from weight_orig before each call",
        "weight_normed": "its weight is computed from weight_g, weight_v before each call",
        "pruned": "its weight is computed from weight_orig before each call",
    }.items():
        assert report.left.pop(name).startswith(why), name
        assert f"left {name}: {why}" in str(convert(zoo(), "nvidia"))
    assert list(report.left) == ["parametrized.parametrizations.weight"]


def test_every_matrix_is_in_the_report():
    model = zoo()
    report = convert(model, "nvidia")
    for name, module in model.named_modules():
        if any(not nn.parameter.is_lazy(p) and p.dim() >= 2 for p in module.parameters(recurse=False)):
            assert (name in report.converted) != (name in report.left), name


def test_the_filter(model):
    """It sees names and modules, and decides last."""
    seen = {}

    def keep_ups(name, module):
        seen[name] = module
        return name.endswith("up")

    report = convert(model, "mxfp8", filter=keep_ups)
    assert report.converted == ["layers.0.up", "layers.1.up"]
    assert report.left["layers.0.down"] == "the filter refused it"
    assert seen == {name: model.get_submodule(name) for name in LAYERS}


def test_a_filter_that_raises_changes_nothing(model):
    with pytest.raises(ZeroDivisionError):
        convert(model, "mxfp8", filter=lambda name, module: 1 / (name != "layers.1.down"))
    assert not converted(model)


@pytest.mark.parametrize("share, kept", [(0, 0), (0.15, 1), (0.25, 1), (0.5, 1), (0.74, 1), (0.75, 2), (1, 2)])
@pytest.mark.filterwarnings("ignore:policy nvidia converts no layer")
def test_keep_last_counts_blocks(model, share, kept):
    """Of two, rounded, at least one where it is asked for; a block is never cut in half."""
    report = convert(model, policies.get("nvidia").with_(keep_last=share))
    at = 4 - 2 * kept
    assert report.converted == LAYERS[:at] == converted(model)
    for name in LAYERS[at:]:
        assert report.left[name] == f"in the last {share:.0%} of blocks, which the policy keeps in BF16"


def test_keep(model):
    report = convert(model, policies.get("nvidia").with_(keep=("layers.0.*",)))
    assert report.converted == ["layers.1.up", "layers.1.down", "lm_head"]
    assert report.left["layers.0.up"] == "the policy keeps modules of this name in BF16"


def test_a_model_that_is_one_layer():
    layer = nn.Linear(16, 16)
    assert convert(layer, "mxfp8").converted == [""] and type(layer) is fp4ext.Linear
    assert "left (the model itself): " in str(convert(nn.Embedding(4, 4)))


def test_the_fast_path_of_a_transformer_layer_is_reported():
    """torch computes it without calling the layers inside."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True).eval()
    assert "torch.backends.mha.set_fastpath_enabled(False)" in convert(layer, "mxfp8").left[""]
    x = torch.randn(2, 5, 32)
    wanted = layer(x).detach()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            assert torch.equal(layer(x), wanted)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_module_used_under_two_names_is_converted_once(model):
    model.again = model.layers[0].up
    assert convert(model, "mxfp8").converted == LAYERS


# And back


def test_revert_restores_exactly(model):
    before, attributes = output(model), [dict(vars(m)) for m in model.modules()]
    convert(model, "nvidia")
    assert not torch.equal(output(model), before)
    assert revert(model) == LAYERS and not converted(model) and revert(model) == []
    assert_bytes_equal(output(model), before)
    for module, wanted in zip(model.modules(), attributes, strict=True):
        assert vars(module).keys() == wanted.keys()
    assert type(model.layers[0].up) is nn.Linear


def test_converting_anew_takes_the_new_policy(model):
    convert(model, "nvidia")
    assert convert(model, "mxfp8").converted == LAYERS
    again = output(model)
    revert(model)
    convert(model, "mxfp8")
    assert_bytes_equal(output(model), again)


@pytest.mark.parametrize(
    "change", [{"keep": ("layers.0.*", "lm_head")}, {"keep_last": 0.5}, None], ids=["keep", "keep_last", "filter"]
)
def test_what_a_second_policy_leaves_becomes_plain(model, change):
    """Left in BF16 is what the report says, so it must not go on by the first policy."""
    convert(model, "nvidia")
    if change is None:
        report = convert(model, "mxfp8", filter=lambda name, module: "up" in name)
    else:
        report = convert(model, policies.get("mxfp8").with_(**change))
    assert converted(model) == report.converted and len(report.converted) == 2
    assert {type(model.get_submodule(name)) for name in LAYERS if name in report.left} == {nn.Linear}


# Copies


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_compute_the_same(model, copier):
    convert(model, policies.get("end_to_end").with_(bf16_forward_from=5))
    other = copier(model)
    assert converted(other) == LAYERS and other.layers[0].up.weight is not model.layers[0].up.weight
    for step in (0, 5):
        fp4ext.set_step(model, step)
        fp4ext.set_step(other, step)
        assert_bytes_equal(output(other), output(model))


# Steps and sizes


def test_set_step_reaches_every_layer(model):
    plain = copy.deepcopy(model)
    convert(model, policies.get("mxfp8").with_(bf16_forward_from=5))
    for step, late in ((4, False), (5, True), (0, False)):
        fp4ext.set_step(model, step)
        assert torch.equal(output(model), output(plain)) is late


# Weights: 4 + 8/16 bits (NVFP4), 8 + 8/32 (MXFP8), 4 + 8/32 (MXFP4). Activations: what wgrad reads.
BITS = {
    "bf16": (16, 16),
    "mxfp8": (8.25, 8.25),
    "nvidia": (4.5, 4.5),
    "four_over_six": (4.5, 4.5),
    "quartet2": (4.5, 4.5),
    "end_to_end": (4.5, 4.5),
    "end_to_end_sr": (4.5, 4.5),
    "mxfp8_backward": (4.5, 4.5),
}


@pytest.mark.parametrize("policy", policies.names())
def test_storage_bits(model, policy):
    convert(model, policy)
    assert fp4ext.storage_bits(model) == dict(zip(("weights", "saved_activations"), BITS[policy], strict=True))
    stage = "rl_sampler"
    assert fp4ext.storage_bits(model, stage)["weights"] == BITS[policy][0]


def test_storage_bits_are_weighted(model):
    """By hand: 0.up is not converted, 0.down has 32·64 weights and 64 inputs in MXFP8; the rest is MXFP4."""
    four = Spec("mxfp4")
    rules = (("layers.0.up", Recipe()), ("layers.0.down", policies.get("mxfp8").pretrain))
    convert(model, Policy("p", Recipe(fp4ext.Fprop(four, four)), rules=rules))
    bits = fp4ext.storage_bits(model)
    assert bits["weights"] == (8.25 + 4.25 + 4.25) / 3
    assert bits["saved_activations"] == (8.25 * 64 + 4.25 * (32 + 64)) / (64 + 32 + 64)


def test_storage_bits_of_a_plain_model(model):
    assert fp4ext.storage_bits(model) == {"weights": 16, "saved_activations": 16}


@pytest.mark.parametrize("f", [convert, revert, fp4ext.storage_bits, lambda m: fp4ext.set_step(m, 1)])
def test_what_is_no_module_is_refused(f):
    with pytest.raises(TypeError, match="model is list; accepted: a torch.nn.Module"):
        f([nn.Linear(2, 2)])


def test_refusals_change_nothing(model):
    convert(model, "nvidia")
    with pytest.raises(ValueError, match="unknown policy 'fp5'; policies: bf16, mxfp8"):
        convert(model, "fp5")
    with pytest.raises(ValueError, match="unknown stage 'train'; accepted: pretrain, "):
        fp4ext.storage_bits(model, "train")
    assert {model.get_submodule(name).policy.name for name in LAYERS} == {"nvidia"}


# Data parallel

RANK = """
import sys, torch, fp4ext
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
fp4ext.convert(model, "mxfp8")
ddp = nn.parallel.DistributedDataParallel(model)
x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
ddp(x[rank]).square().mean().backward()
summed = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
for part in x:
    model(part).square().mean().div(2).backward()
for got, p in zip(summed, model.parameters()):
    torch.testing.assert_close(got, p.grad, rtol=1e-6, atol=1e-7)
"""


@pytest.mark.slow
def test_two_processes_average_their_gradients(tmp_path):
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        _, error = rank.communicate(timeout=120)
        assert rank.returncode == 0, error.decode()


# Experts


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = fp4ext.Experts(4, 32, 16, policy="bf16")


def test_experts_change_their_policy():
    """They have no plain class: the policy bf16 is plain."""
    m, x, at = MoE(), torch.randn(12, 32), torch.tensor([3, 3, 9, 12], dtype=torch.int32)
    state, plain = m.state_dict(), m.experts(x, at)
    report = fp4ext.convert(m, fp4ext.policies.get("mxfp8").with_(keep=("router",)))
    assert report.converted == ["experts"] and list(report.left) == ["router"]
    assert m.experts.policy_name == "experts" and type(m.experts) is fp4ext.Experts
    assert not torch.equal(m.experts(x, at), plain) and m.state_dict().keys() == state.keys()
    assert fp4ext.storage_bits(m) == {"weights": 8.25, "saved_activations": 8.25}
    assert fp4ext.revert(m) == ["experts"] and fp4ext.revert(m) == []
    assert torch.equal(m.experts(x, at), plain)
    fp4ext.convert(m, fp4ext.policies.get("mxfp8").with_(bf16_forward_from=5))
    fp4ext.set_step(m, 5)
    assert torch.equal(m.experts(x, at), plain)
    assert fp4ext.convert(m, filter=lambda name, module: False).left["experts"] == "the filter refused it"
    assert torch.equal(m.experts(x, at), plain)
