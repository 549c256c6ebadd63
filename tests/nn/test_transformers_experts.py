"""The experts of transformers' models: the real classes, in small random configurations."""

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

import fp4ext
from fp4ext import Recipe, policies
from fp4ext.nn import transformers_experts
from fp4ext.testing import assert_bytes_equal, generate

transformers = pytest.importorskip("transformers", minversion="5.24")

SMALL = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
INKLING2 = SMALL | dict(
    unpadded_vocab_size=64,
    head_dim=16,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=16,
    sliding_window_size=16,
    rel_extent=32,
    layer_types=["hybrid_sliding", "hybrid"],
    n_layers_per_attn_res_block=2,
    moe_intermediate_size=32,
    n_routed_experts=5,
    num_experts_per_tok=2,
    eos_token_id=None,
)
DEEPSEEK = SMALL | dict(
    num_key_value_heads=4,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
)
MODELS = {
    "Mixtral": ("MixtralConfig", SMALL | dict(intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)),
    "GptOss": (
        "GptOssConfig",
        SMALL | dict(intermediate_size=32, head_dim=16, num_local_experts=6, num_experts_per_tok=3, sliding_window=16),
    ),
    "Inkling2": ("Inkling2TextConfig", INKLING2),
    "DeepseekV3": ("DeepseekV3Config", DEEPSEEK),
    "Qwen3Moe": (
        "Qwen3MoeConfig",
        SMALL | dict(head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
    ),
}
# Experts that compute in yet another way, alone: transposed weights, no gate, a norm behind each expert.
ALONE = {
    "Aria": ("aria", "AriaExperts", "AriaTextConfig", dict(hidden_size=64, intermediate_size=32, moe_num_experts=4)),
    "NemotronH": (
        "nemotron_h",
        "NemotronHExperts",
        "NemotronHConfig",
        dict(hidden_size=64, moe_intermediate_size=32, n_routed_experts=4),
    ),
    "MuseSpark": (
        "muse_spark",
        "MuseSparkExperts",
        "MuseSparkTextConfig",
        dict(moe_hidden_size=64, moe_intermediate_size=32, num_local_experts=4),
    ),
}
QUANTIZED = [name for name in policies.names() if name != "bf16"]


def model(name, dtype=torch.float32):
    config, sizes = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**sizes))
    for parameter in made.parameters():  # no biases and norms that are zero and one, and experts that count
        if parameter.dim() != 2:
            nn.init.normal_(parameter, std=0.2)
    return made.to(dtype)


def experts(name, dtype=torch.float32):
    """The experts of a model's last layer, or those alone."""
    if name in MODELS:
        return [m for m in model(name, dtype).modules() if transformers_experts.is_stacked(m)][-1]
    room, kind, config, sizes = ALONE[name]
    module = importlib.import_module(f"transformers.models.{room}.modeling_{room}")
    torch.manual_seed(0)
    made = getattr(module, kind)(getattr(transformers, config)(**sizes)).to(dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


def given(m, tokens=23, top_k=2, dtype=torch.float32):
    """x, the chosen experts, different ones a token, and weights. Expert 1 gets nobody."""
    x = generate("gaussian", tokens, 64, seed=1, dtype=dtype)
    others = torch.tensor([e for e in range(m.num_experts) if e != 1])
    order = torch.rand(tokens, len(others), generator=torch.Generator().manual_seed(2)).argsort(1)
    weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    return x.requires_grad_(), others[order[:, :top_k]], weights.to(dtype).requires_grad_()


TOKENS = torch.arange(60).reshape(3, 20)


def run(m, *arguments):
    """Output and gradients of x, weights and parameters."""
    torch.manual_seed(7)
    y = m(*arguments)
    leaves = [t for t in arguments if t.requires_grad] + list(m.parameters())
    return [y.detach(), *torch.autograd.grad(y, leaves, generate("gaussian", *y.shape, seed=4, dtype=y.dtype))]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("name", [*MODELS, *ALONE])
def test_plain_experts_compute_what_they_did(name, dtype, bound):
    """Of our class, with nothing quantized: outputs and gradients; difference over the largest: fp32 sums of 64 terms
    in another order, or four roundings to bf16, 2⁻⁸ each, that eager experts make and these do not."""
    m = experts(name, dtype)
    arguments = given(m, dtype=dtype)
    wanted = run(m, *arguments)
    transformers_experts.swap(m)
    m.set_policy("bf16")
    for got, want in zip(run(m, *arguments), wanted, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize("policy", QUANTIZED)
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_each_expert_is_two_linear_layers(name, policy):
    """By a policy, byte for byte: fp4ext.Linear of each expert's rows, then the weighted sum."""
    m = experts(name)
    x, chosen, weights = given(m)
    fp4ext.convert(m, policy)
    recipe = m.recipes["pretrain"]

    def linear(rows, which, e):
        w = getattr(m, which)[e]
        y = fp4ext.linear(rows, w.T if m.is_transposed else w, None, recipe)
        return y + getattr(m, f"{which}_bias")[e] if m.has_bias else y

    with torch.no_grad():
        parts = torch.zeros(*chosen.shape, 64)
        for e in range(m.num_experts):
            token, rank = (chosen == e).nonzero(as_tuple=True)
            order = (token * chosen.shape[1] + rank).argsort()
            token, rank = token[order], rank[order]
            parts[token, rank] = linear(m._apply_gate(linear(x[token], "gate_up_proj", e)), "down_proj", e)
        wanted = parts[:, 0] * weights[:, :1] + parts[:, 1] * weights[:, 1:]
        assert_bytes_equal(m(x, chosen, weights), wanted)


@pytest.mark.parametrize("policy", ["mxfp8", "nvidia", "end_to_end"])
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_learns(name, policy):
    """Every parameter that had a gradient has one, along the unconverted model's (a random direction has a cosine of
    0.01; 4 bits turn the gradient, and tokens at the router's edge choose other experts)."""
    m = model(name)
    wanted = run_loss(m)
    report = fp4ext.convert(m, policy)
    names = [n for n, module in m.named_modules() if isinstance(module, transformers_experts.Stacked)]
    assert names and set(names) <= set(report.converted)
    got = run_loss(m)
    assert got.keys() == wanted.keys() and all(t.isfinite().all() for t in got.values())
    for key in ("loss", *(f"{n}.down_proj" for n in names)):
        assert torch.cosine_similarity(got[key].flatten(), wanted[key].flatten(), 0) > 0.3, key
    assert not torch.equal(got["loss"], wanted["loss"])


def run_loss(m):
    m.zero_grad()
    torch.manual_seed(7)
    logits = m(TOKENS, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_the_model_stays_what_it_was(name, tmp_path):
    """Parameters, state_dict, class names; saved and loaded by transformers; and back."""
    m = model(name)
    before, parameters, state = m(TOKENS).logits.detach(), dict(m.named_parameters()), copy.deepcopy(m.state_dict())
    kinds = {n: type(module) for n, module in m.named_modules()}
    report = fp4ext.convert(m, "end_to_end")
    assert all(p is parameters[n] for n, p in m.named_parameters())
    assert all(type(module).__name__ in (kinds[n].__name__, "Linear") for n, module in m.named_modules())
    assert m.state_dict().keys() == state.keys()
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert_bytes_equal(other(TOKENS).logits.detach(), m(TOKENS).logits.detach())
        assert {n: type(x) for n, x in other.named_modules()} == {n: type(x) for n, x in m.named_modules()}
    m.save_pretrained(tmp_path)
    loaded = type(m).from_pretrained(tmp_path)
    assert {n: type(module) for n, module in loaded.named_modules()} == kinds
    assert_bytes_equal(loaded(TOKENS).logits.detach(), before)
    assert fp4ext.revert(m) == report.converted and {n: type(module) for n, module in m.named_modules()} == kinds
    assert_bytes_equal(m(TOKENS).logits.detach(), before)
    assert not any(hasattr(module, "recipes") for module in m.modules())


def test_what_is_left_of_inkling2():
    """Router, norms and convolutions, the static and the dynamic; embedding and head."""
    report = fp4ext.convert(model("Inkling2"), "end_to_end")
    projections = ["q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.gate_proj", "o_proj.linear"]
    layer = [f"self_attn.{name}" for name in (*projections, "relative_position_bias.linear")] + ["mlp.experts"]
    assert report.converted == [f"model.layers.{i}.{name}" for i in range(2) for name in layer]
    for part in (
        "mlp.gate",
        "sconv.conv1d",
        "sconv.weight_proj",
        "sink_proj",
        "post_mlp_convolution",
        "embed",
        "lm_head",
    ):
        assert any(part in name for name in report.left), part


def test_what_cannot_be_converted_says_why():
    m = experts("Mixtral")
    m._is_expert_parallel = True
    assert fp4ext.convert(m).left == {"": "its experts are spread over processes"}
    m = experts("GptOss")
    m.down_proj_bias = None
    assert fp4ext.convert(m).left == {"": "GptOssExperts has no down_proj_bias"}
    m = experts("Mixtral").double()
    assert fp4ext.convert(m).left[""].startswith("its weight is torch.float64; accepted")
    llama = importlib.import_module("transformers.models.llama4.modeling_llama4")
    config = transformers.Llama4TextConfig(hidden_size=64, intermediate_size=32, num_local_experts=2)
    why = "Llama4TextExperts has stacked weights, but does not say as transformers' experts do how it computes"
    assert fp4ext.convert(llama.Llama4TextExperts(config)).left == {"": why}


# Policies by the names of real classes


def recipes(m, policy):
    report = fp4ext.convert(m, policy)
    return {name: m.get_submodule(name).recipes for name in report.converted}, report.left


def test_published_rl_practice():
    """Routed experts in 4 bits; attention, shared experts and the last 15 % of layers in BF16."""
    base = policies.get("end_to_end")
    practice = base.with_(keep=(*base.keep, "*.self_attn.*", "*.shared_experts.*", "model.layers.0.mlp.*"))
    got, left = recipes(model("DeepseekV3"), practice)
    assert list(got) == ["model.layers.1.mlp.experts"]
    assert "model.layers.1.mlp.shared_experts.up_proj" in left and "model.layers.1.self_attn.o_proj" in left
    assert got["model.layers.1.mlp.experts"]["rl_sampler"] == base.recipe("rl_sampler", "x")
    got, left = recipes(model("DeepseekV3"), base.with_(keep_last=0.15))
    assert "in the last 15% of blocks" in left["model.layers.1.mlp.shared_experts.down_proj"]


def test_recipes_by_component():
    """Routed experts by NVIDIA's recipe, shared ones in MXFP8, attention in BF16, the rest end to end."""
    base, mx, nv = (policies.get(name) for name in ("end_to_end", "mxfp8", "nvidia"))
    rules = (("*.experts", nv.pretrain), ("*.shared_experts.*", mx.pretrain), ("*.self_attn.*", Recipe()))
    got, left = recipes(model("DeepseekV3"), base.with_(rules=rules))
    routed, shared = got["model.layers.1.mlp.experts"], got["model.layers.1.mlp.shared_experts.up_proj"]
    assert routed["pretrain"] == nv.pretrain and shared["pretrain"] == mx.pretrain
    assert routed["rl_sampler"] == routed["rl_trainer"] and routed["rl_sampler"].fprop.x.outer == "row"
    assert routed["rl_sampler"].fprop.w == nv.pretrain.fprop.w.with_(outer="pow2")
    assert shared["rl_sampler"].fprop == mx.pretrain.fprop and not shared["rl_sampler"].dgrad.dy
    assert "quantizes nothing in modules of this name" in left["model.layers.1.self_attn.o_proj"]
    assert got["model.layers.0.mlp.up_proj"]["rl_sampler"] == base.recipe("rl_sampler", "x")


def test_bits():
    """Of gpt-oss: weights [E, K, N], whose contraction comes first, and biases, which do not count."""
    m = experts("GptOss")
    fp4ext.convert(m, "nvidia")
    assert fp4ext.storage_bits(m) == {"weights": 4.5, "saved_activations": 4.5}
    rule = policies.get("mxfp8").with_(bf16_forward_from=3)
    fp4ext.convert(m, rule)
    fp4ext.set_step(m, 3)
    assert not m.recipes["pretrain"].fprop.x
    assert repr(m).startswith("GptOssExperts(") and "policy=mxfp8" in repr(m)


@pytest.mark.parametrize("name", [*MODELS, *ALONE])
def test_packed_experts_are_the_samplers(name):
    """pack holds both stacks as codes and gives the sampler's bits, under autocast too; refit follows the weights, also
    plain ones; copies and pickles stay packed."""
    m = experts(name)
    fp4ext.convert(m, "end_to_end")
    x, chosen, weights = (t.detach() for t in given(m))

    def both(packed, wanted):
        for autocast in (False, True):
            with fp4ext.stage("rl_sampler"), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, autocast):
                assert_bytes_equal(packed(x, chosen, weights), wanted(x, chosen, weights), name)

    packed = fp4ext.pack(m)
    both(packed, m)
    assert isinstance(packed, type(m).__mro__[2]) and not any(p.dim() == 3 for p in packed.parameters())
    held = fp4ext.packed_weights(packed)
    assert [8 * w.nbytes / w.shape.numel() < 4.7 for w in held] == [True, True] and "bits per weight" in repr(packed)
    assert [p.shape for p in m.parameters() if p.dim() == 3]  # the model keeps its own
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1.5).add_(0.01)
    places = [b.data_ptr() for b in packed.buffers()]
    again = copy.deepcopy(m)
    fp4ext.revert(again)
    fp4ext.refit(packed, again)
    assert places == [b.data_ptr() for b in packed.buffers()]
    both(packed, m)
    both(copy.deepcopy(packed), m)
    both(pickle.loads(pickle.dumps(packed)), m)
