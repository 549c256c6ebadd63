"""One decision: what convert trains in 4 bits is what every way to a checkpoint writes in 4 bits, to the byte."""

import json
import warnings

import pytest
import torch
from torch import nn

import fp4ext
from fp4ext import QuantizedLinear, policies
from fp4ext.conversion.names import named_modules
from fp4ext.export import load, save
from fp4ext.testing import assert_bytes_equal

from .architectures import MODELS, build
from .models import folder_of, opened, transformers
from .weights import weight

pytestmark = pytest.mark.filterwarnings("ignore:experts in")
KEEPS_LAST = policies.get("nvidia").with_(name="keeps last", keep_last=0.3)


def saved(*args, **how):
    return save(*args, progress=False, **how)


def packed_layers(model):
    return {n: m for n, m in named_modules(model) if isinstance(m, QuantizedLinear) or hasattr(m, "held")}


def same_weights(a, b):
    """Packed weights decode to the same numbers: an outer scale that is shared moves no value."""
    a, b = packed_layers(a), packed_layers(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].x == b[name].x, name
        for x, y in zip(a[name].weights, b[name].weights, strict=True):
            assert_bytes_equal(y.dequantize(torch.float32), x.dequantize(torch.float32), name)


@pytest.mark.parametrize("name", MODELS)
def test_every_way_gives_the_same_checkpoint(name, tmp_path):
    """convert, pack, save(m), save(pack(m)), save of the plain model, export of its saved checkpoint; and load."""
    policy = policies.get("end_to_end") if sum(map(ord, name)) % 2 else KEEPS_LAST
    plain, model = build(name), build(name)
    plain.save_pretrained(tmp_path / "plain")
    report = fp4ext.convert(model, policy)
    packed = fp4ext.pack(model)
    assert list(packed_layers(packed)) == report.converted and report.converted
    first = saved(model, tmp_path / "a")
    reports = {
        "b": saved(packed, tmp_path / "b"),
        "c": saved(tmp_path / "plain", tmp_path / "c", policy=policy),
        "d": saved(plain, tmp_path / "d", policy=policy),
        "e": saved(model, tmp_path / "e", policy=policy),
    }
    assert "names alone" not in reports["c"].decided_by and not first.lost
    bytes_ = (tmp_path / "a/model.safetensors").read_bytes()
    for way, other in reports.items():
        assert other.quantized == first.quantized, way
        assert (tmp_path / way / "model.safetensors").read_bytes() == bytes_, way
    for way in "cde":
        assert reports[way].left.keys() == first.left.keys(), way
    config, other = (json.loads((tmp_path / way / "config.json").read_text()) for way in "ac")
    assert config["quantization_config"] == other["quantization_config"]
    same_weights(load(tmp_path / "a", build(name)), packed)


MIXTURES = ["Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM", "Gemma4ForCausalLM", "JambaForCausalLM"]


@pytest.mark.parametrize("layout", ["fp4ext", "modelopt"])
@pytest.mark.parametrize("name", [*MIXTURES, "LlavaForConditionalGeneration"])
def test_other_layouts_come_back_into_the_class(name, layout, tmp_path):
    model = build(name)
    fp4ext.convert(model, "end_to_end")
    packed = fp4ext.pack(model)
    for i, source in enumerate((model, packed)):
        saved(source, tmp_path / f"{i}", layout)
        same_weights(load(tmp_path / f"{i}", build(name)), packed)


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "LlavaForConditionalGeneration"])
def test_a_plain_checkpoint_comes_back_into_its_class(name, tmp_path):
    build(name).save_pretrained(tmp_path / "plain")
    model = build(name)
    wanted = {n: t.clone() for n, t in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load(tmp_path / "plain", model)
    for n, t in model.state_dict().items():
        assert_bytes_equal(t, wanted[n], n)


@pytest.mark.parametrize("layout", ["gpt-oss", "inkling2"])
@pytest.mark.parametrize("name", ["GptOssForCausalLM", "Qwen3MoeForCausalLM"])
def test_layouts_of_experts_alone_come_back(name, layout, tmp_path):
    """What the layout holds is packed; the rest is plain."""
    policy = "mxfp8" if layout == "inkling2" else None
    model = build(name)
    if layout == "inkling2":
        fp4ext.convert(model, policy)
    saved(model, tmp_path / "a", layout)
    back = load(tmp_path / "a", build(name), policy=policy)
    assert [n.rpartition(".")[2] for n in packed_layers(back)] == ["experts"] * 2
    for n, m in packed_layers(back).items():
        stack = build(name).get_submodule(n)
        for leaf in m.stacks:
            w = getattr(stack, leaf)
            w = w.mT if m.is_transposed else w
            wanted = fp4ext.quantize(w[1], policy or "mxfp4").dequantize(torch.float32)
            assert_bytes_equal(m.held(leaf).dequantize(torch.float32)[1], wanted, n)


def test_a_mixture_obeys_its_policy_for_its_experts_too(tmp_path):
    model = build("Qwen3MoeForCausalLM")
    fp4ext.convert(model, "mxfp8")
    assert set(saved(model, tmp_path / "out").quantized.values()) == {"mxfp8"}


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("left", ["keep", "keep_last", "filter", "rule"])
def test_what_convert_left_stays_plain(name, left, tmp_path):
    base = policies.get("mxfp8")
    policy = {
        "keep": base.with_(keep=(*base.keep, "*.mlp*")),
        "keep_last": base.with_(keep_last=0.5),
        "rule": base.with_(rules=(("*.1.*", fp4ext.Recipe()),)),
    }.get(left, base)
    model = build(name)
    keeps = (lambda n, m: "o_proj" not in n) if left == "filter" else None
    report = fp4ext.convert(model, policy, keeps)
    quantized = saved(model, tmp_path / "out").quantized
    assert set(quantized.values()) == {"mxfp8"}
    for name in report.left:
        assert not any(weight.startswith(f"{name}.") for weight in quantized), name


def test_a_tied_head_is_opened_by_transformers(tmp_path):
    """`ignore` lacked it, and transformers then looked for its packed weight."""
    model = build("Qwen3ForCausalLM")
    assert model.config.tie_word_embeddings
    model.save_pretrained(tmp_path / "plain")
    (tmp_path / "by names").mkdir()
    saved(model, tmp_path / "out")
    saved({n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}, tmp_path / "by names" / "x",
          config=json.loads((tmp_path / "plain/config.json").read_text()) | {"architectures": None})  # fmt: skip
    tokens = torch.arange(24).reshape(2, 12)
    for folder in (tmp_path / "out", tmp_path / "by names" / "x"):
        config = json.loads((folder / "config.json").read_text())
        assert "lm_head" in config["quantization_config"]["ignore"]
    with torch.no_grad():
        got = opened(tmp_path / "out")(tokens).logits
        plain = load(tmp_path / "out", build("Qwen3ForCausalLM"), policy="bf16")(tokens).logits
    assert (got - plain).abs().max() <= 2**-5 * plain.abs().max()


@pytest.mark.filterwarnings("default:experts in")
def test_a_mixture_in_a_layout_that_transformers_misreads_warns(tmp_path):
    model = build("Qwen3MoeForCausalLM")
    for policy, words in (("end_to_end", "drops their weight_global_scale"), ("mxfp8", "cannot open them")):
        with pytest.warns(UserWarning, match=f"transformers .seen in 5.24. {words}"):
            report = saved(model, tmp_path / policy, policy=policy)
        assert f"warning: experts in {report.quantized.popitem()[1]}" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert not saved(model, tmp_path / "mx", policy="mxfp4").warnings
        assert not saved(model, tmp_path / "own", "fp4ext").warnings


def test_a_mixture_in_mxfp4_is_read_right_by_transformers(tmp_path):
    """What the warning recommends. Logits in BF16: 2⁻⁵ of the largest, as for a dense model."""
    saved(build("Qwen3MoeForCausalLM"), tmp_path / "out", policy="mxfp4")
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        theirs = opened(tmp_path / "out")(tokens).logits
        ours = load(tmp_path / "out", build("Qwen3MoeForCausalLM"), policy="bf16")(tokens).logits
    assert (theirs - ours).abs().max() <= 2**-5 * ours.abs().max()


def test_names_alone_say_that_they_were(tmp_path):
    """No class: by names, and the report tells why."""
    source = {f"layers.{i}.{n}.weight": weight(64, 64, seed=i) for i in range(4) for n in ("q_proj", "router.proj")}
    folder = folder_of(tmp_path / "in", source, {"model_type": "llama", "architectures": ["NoSuchForCausalLM"]})
    report = saved(folder, tmp_path / "out", policy=KEEPS_LAST)
    assert "names alone, for transformers" in report.decided_by and "has no NoSuchForCausalLM" in str(report)
    assert list(report.quantized) == [f"layers.{i}.q_proj.weight" for i in range(3)]
    assert "in the last 30% of blocks" in report.left["layers.3.q_proj.weight"]
    assert saved(source, tmp_path / "again").decided_by.startswith("names alone, for config.json names no class")


def test_a_config_that_does_not_fit_its_weights_builds_nothing(tmp_path):
    """A stranger's config.json may ask for a million layers."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**6}
    folder = folder_of(tmp_path / "in", {"layers.0.q_proj.weight": weight(64, 64)}, config)
    assert "1000000 layers, and there are 1 tensors" in saved(folder, tmp_path / "out").decided_by
    config = {"model_type": "gpt2", "architectures": ["no"]}
    folder = folder_of(tmp_path / "gpt2", {"h.0.c_fc.weight": weight(64, 64), "x.y": weight(64)}, config)
    with pytest.raises(fp4ext.export.Refused, match="a matrix of Conv1D"):
        saved(folder, tmp_path / "out2")


def test_wrappers_are_not_in_a_checkpoint(tmp_path):
    plain, inside = build("LlamaForCausalLM"), build("LlamaForCausalLM")
    saved(plain, tmp_path / "plain", policy="nvidia")
    inside.model.layers[0] = torch.compile(inside.model.layers[0], backend="eager")
    for i, m in enumerate((inside, torch.compile(plain, backend="eager"), nn.DataParallel(plain))):
        fp4ext.convert(m, "nvidia")
        for j, source in enumerate((m, fp4ext.pack(m))):
            saved(source, tmp_path / f"{i}{j}")
            there = (tmp_path / f"{i}{j}/model.safetensors").read_bytes()
            assert there == (tmp_path / "plain/model.safetensors").read_bytes(), (i, j)
            back = load(tmp_path / f"{i}{j}", torch.compile(build("LlamaForCausalLM"), backend="eager"))
            assert len(packed_layers(back)) == 14


def test_what_was_decided_is_recorded_and_read(tmp_path):
    model = build("LlamaForCausalLM")
    policy = policies.get("mxfp8").with_(name="mine", keep=("*.0.*", "lm_head"))
    fp4ext.convert(model, policy)
    saved(model, tmp_path / "out")
    said = json.loads((tmp_path / "out/fp4ext.json").read_text())
    assert said["decided_by"] == "the modules of the model" and said["policy"]["name"] == "mine"
    assert "model.layers.0.mlp.up_proj.weight" in sum(said["left"].values(), [])
    back = load(tmp_path / "out", build("LlamaForCausalLM"))
    assert all(m.x == policy.pretrain.fprop.x for m in packed_layers(back).values()) and packed_layers(back)
    (tmp_path / "out/fp4ext.json").write_text('{"policy": {"keep": 3}}')
    with pytest.raises(fp4ext.export.Refused, match="fp4ext.json: keep is 3"):
        load(tmp_path / "out", build("LlamaForCausalLM"))


@pytest.mark.parametrize(
    "group", [("to_q", "to_k", "to_v"), ("wq", "wk", "wv"), ("q_a_proj", "kv_a_proj_with_mqa"), ("wi_0", "wi_1")]
)
def test_what_is_multiplied_as_one_shares_an_outer_scale(group, tmp_path):
    """And keeps the numbers that the sampler has: block scales move by a power of two, codes stay."""
    model = nn.ModuleDict({"attn": nn.ModuleDict({n: nn.Linear(64, 64, bias=False) for n in group})})
    with torch.no_grad():
        for i, layer in enumerate(model["attn"].values()):
            layer.weight.normal_(0, 10.0**-i)
    fp4ext.convert(model, "end_to_end")
    packed = fp4ext.pack(model)
    for i, source in enumerate((model, packed)):
        report = saved(source, tmp_path / f"{i}")
        out = load(tmp_path / f"{i}")
        assert len({out[n].global_scale.item() for n in report.quantized}) == 1
        for n, m in packed_layers(packed).items():
            if f"{n}.weight" not in report.lost:
                assert_bytes_equal(out[f"{n}.weight"].dequantize(torch.float32), m.weight.dequantize(torch.float32), n)
    assert (tmp_path / "0/model.safetensors").read_bytes() == (tmp_path / "1/model.safetensors").read_bytes()


def test_block_scales_that_a_shared_outer_scale_rounds_are_reported(tmp_path):
    model = nn.ModuleDict({n: nn.Linear(64, 64, bias=False) for n in ("q_proj", "k_proj", "v_proj")})
    with torch.no_grad():
        model["v_proj"].weight.mul_(2.0**-14)
    fp4ext.convert(model, "end_to_end")
    for i, source in enumerate((model, fp4ext.pack(model))):
        report = saved(source, tmp_path / f"{i}")
        assert list(report.lost) == ["v_proj.weight"] and "block scales are rounded" in report.lost["v_proj.weight"]
    assert (tmp_path / "0/model.safetensors").read_bytes() == (tmp_path / "1/model.safetensors").read_bytes()


def test_transformers_is_there():
    assert transformers().__version__
