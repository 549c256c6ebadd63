"""save: what is quantized, how it is named and shared, what is left, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fp4ext
from fp4ext import Policy, QTensor, Spec, quantize
from fp4ext.export import Refused, convert_checkpoint, inspect, load, save
from fp4ext.testing import assert_bytes_equal, generate

from .judges import mixed
from .models import folder_of, plain
from .weights import MXFP4, SWEEP, dense_model, experts, same, weight

LEFT = {
    "model.embed_tokens.weight": "an embedding, norm, convolution or head, by its name",
    "model.layers.0.mlp.gate.weight": "the policy keeps modules of this name in BF16",
    "model.layers.0.conv.weight": "3-D, and no stack of experts",
    "model.layers.0.tiny.weight": "tiny",
    "model.layers.0.odd.weight": "K = 40 is not whole blocks of 16",
    "model.layers.0.half.weight": "its dtype is float64",
    "lm_head.weight": "an embedding, norm, convolution or head, by its name",
}


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_what_is_quantized_and_what_is_left(layout, tmp_path):
    source = dense_model()
    report = save(folder_of(tmp_path / "in", source), tmp_path / "out", layout)
    assert report.left == LEFT
    assert set(report.quantized.values()) == {"nvfp4"} and len(report.quantized) == 7
    out = load(tmp_path / "out")
    assert out.keys() == source.keys() and report.bytes < report.was and not report.lost
    for name, w in out.items():
        if name in report.quantized:
            assert isinstance(w, QTensor) and w.global_scale.log2().frac() == 0
        else:
            assert_bytes_equal(w, source[name], name)
    assert not inspect(tmp_path / "out").faults and "7 in nvfp4" in str(report) and "1 left plain: tiny" in str(report)


def test_fused_matrices_share_an_outer_scale(tmp_path):
    """And their codes are those of the quantizer, given the amax of all."""
    source = dense_model()
    save(source, tmp_path / "out")
    out = load(tmp_path / "out")
    attention = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    both = [f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up")]
    for group in (attention, both, ["model.layers.0.self_attn.o_proj.weight"]):
        amax = torch.stack([source[name].abs().max() for name in group]).max().float()
        for name in group:
            same(out[name], quantize(source[name], SWEEP, amax=amax, role="w"))
    own = quantize(source[attention[2]], SWEEP)
    assert own.global_scale < out[attention[2]].global_scale


def test_names_of_other_families_share_too(tmp_path):
    names = [
        "encoder.0.attention.self.query.weight",
        "encoder.0.attention.self.key.weight",
        "b.w1.weight",
        "b.w3.weight",
    ]
    source = {name: weight(64, 64, seed=i) * 10**i for i, name in enumerate(names)}
    save(source, tmp_path / "out")
    scales = [load(tmp_path / "out")[name].global_scale.item() for name in names]
    assert scales[0] == scales[1] != scales[2] == scales[3]


@pytest.mark.parametrize("outer, exact", [("pow2", True), ("tensor", False)])
def test_an_outer_scale_that_no_divisor_says_is_reported(outer, exact, tmp_path):
    x = {"a.weight": weight(64, 64)}
    spec = Spec("nvfp4", "sweep", outer=outer)
    report = save(x, tmp_path / "out", policy=spec)
    assert (report.lost == {}) == exact
    q, wanted = load(tmp_path / "out")["a.weight"], quantize(x["a.weight"], spec)
    assert_bytes_equal(q.codes, wanted.codes)
    assert_bytes_equal(q.scales, wanted.scales)
    assert (q.global_scale / wanted.global_scale - 1).abs() <= 2**-23
    assert (q.global_scale == wanted.global_scale) >= exact
    raw = load_file(tmp_path / "out" / "model.safetensors")["a.weight_global_scale"]
    assert raw.shape == (1,) and raw.dtype == torch.float32  # 0-d would be divided by in bf16


def test_divisor_or_multiplier(tmp_path):
    """g = 3584: read as a multiplier it would be wrong by 3584²."""
    q = quantize(torch.ones(64, 64) * 2688 / 3584, "nvfp4")
    stored = {"a.weight_packed": q.codes, "a.weight_scale": q.scales, "a.weight_global_scale": torch.tensor([3584.0])}
    folder_of(tmp_path / "in", stored)
    assert load(tmp_path / "in")["a.weight"].dequantize(torch.float32)[0, 0].item() == pytest.approx(0.75, rel=1e-6)
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", "modelopt")
    assert "weight_scale_2 is rounded to fp32" in report.lost["a.weight"]
    scale_2 = load_file(tmp_path / "out" / "model.safetensors")["a.weight_scale_2"]
    assert scale_2.shape == () and scale_2.item() == pytest.approx(1 / 3584, rel=1e-7)
    convert_checkpoint(tmp_path / "in", tmp_path / "back", "compressed-tensors")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "in/model.safetensors").read_bytes()


# Policies


def test_policy_per_module_and_filter(tmp_path):
    policy = mixed(pattern="*o_proj").with_(keep=("down_proj", "gate"))
    report = save(dense_model(), tmp_path / "out", policy=policy, filter=lambda name, shape: "v_proj" not in name)
    formats = {name.split(".")[-2]: fmt for name, fmt in report.quantized.items()}
    wanted = dict.fromkeys(["q_proj", "k_proj", "gate_proj", "up_proj"], "nvfp4") | {"o_proj": "mxfp8"}
    assert formats == wanted
    assert report.left["model.layers.0.self_attn.v_proj.weight"] == "the filter refused it"
    groups = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["config_groups"]
    assert {group["format"]: len(group["targets"]) for group in groups.values()} == {
        "mxfp8-quantized": 1,
        "nvfp4-pack-quantized": 4,
    }


def test_keep_last_counts_layers_in_their_order(tmp_path):
    source = {f"layers.{i}.w.weight": weight(64, 64, seed=i) for i in range(12)}
    policy = fp4ext.policies.get("end_to_end").with_(keep_last=0.25)
    report = save(source, tmp_path / "out", policy=policy)
    assert sorted(report.left) == ["layers.10.w.weight", "layers.11.w.weight", "layers.9.w.weight"]


def test_a_module_by_its_own_policy(tmp_path):
    """Converted layers by theirs; what convert left is left, and so is what is no linear layer, whatever its name."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 48), "e": nn.Embedding(64, 64)})
    model["c"] = nn.Linear(64, 64, bias=False)
    model["c"].weight = model["a"].weight
    fp4ext.convert(model, "nvidia", filter=lambda name, module: name == "b")
    report = save(model, tmp_path / "out")
    out = load(tmp_path / "out")
    assert report.quantized == {"b.weight": "nvfp4"}
    left = "the model was converted, and this was left"
    assert report.left == {"a.weight": left, "e.weight": "not a linear layer's weight", "c.weight": left}
    same(out["b.weight"], quantize(model["b"].weight, "nvfp4", scale="amax", outer="pow2"))
    assert_bytes_equal(out["a.weight"], model["a"].weight.data)
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["ModuleDict"]


def test_qtensors_are_written_as_they_are(tmp_path):
    q = quantize(weight(64, 64), "nvfp4", outer="tensor")
    save({"a.weight": q}, tmp_path / "out", "modelopt")
    same(load(tmp_path / "out")["a.weight"], q)


def test_policy_objects_and_specs_are_the_same_thing(tmp_path):
    both = fp4ext.Recipe(fp4ext.Fprop(SWEEP, SWEEP))
    for i, policy in enumerate(("end_to_end", SWEEP, SWEEP.key, Policy("mine", both))):
        save(dense_model(), tmp_path / f"{i}", policy=policy)
    first = (tmp_path / "0/model.safetensors").read_bytes()
    assert (tmp_path / "3/model.safetensors").read_bytes() == first
    assert load(tmp_path / "1").format("model.layers.0.mlp.gate.weight") is None  # a router, whatever the spec
    assert (tmp_path / "1/model.safetensors").read_bytes() == (tmp_path / "2/model.safetensors").read_bytes()


def test_a_policy_from_a_file(tmp_path):
    """As anywhere; a file that is not there is said to be missing, not taken for a spec."""
    path = tmp_path / "mine.toml"
    path.write_text(fp4ext.policy.policy_file.dumps(fp4ext.policies.get("end_to_end").with_(keep=("o_proj", "gate"))))
    report = save(dense_model(), tmp_path / "out", policy=str(path))
    assert "keeps modules" in report.left["model.layers.0.self_attn.o_proj.weight"]
    with pytest.raises(ValueError, match="none.toml"):
        save(dense_model(), tmp_path / "two", policy="none.toml")


def test_a_transformers_model_by_the_names_of_its_own_checkpoint(tmp_path):
    from .models import MODELS

    torch.manual_seed(0)
    model = MODELS["inkling2_loop"]().bfloat16()
    save(model, tmp_path / "out", "inkling2")
    plain("inkling2_loop", tmp_path / "plain")
    assert load(tmp_path / "out").keys() == load(tmp_path / "plain").keys()
    llama = MODELS["llama"]().bfloat16()
    fp4ext.convert(llama, "mxfp8", filter=lambda name, module: "mlp" in name)
    report = save(llama, tmp_path / "llama")
    assert {name.split(".")[3]: fmt for name, fmt in report.quantized.items()} == {"mlp": "mxfp8"}


# Blocks of zeros, dead experts


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_zero_blocks_have_a_scale_that_can_be_divided_by(layout, tmp_path):
    x = generate("zeros", 64, 256, dtype=torch.bfloat16)
    x[3] = 0
    x[5, :16] = 1e-30  # rounds to a scale of 0: codes that would mean nothing
    save({"a.weight": x}, tmp_path / "out", layout, policy="nvfp4/amax/nearest/1x16/pow2")
    q = load(tmp_path / "out")["a.weight"]
    assert (q.scales.view(torch.uint8) > 0).all() and (q.scales.view(torch.uint8) < 0x7F).all()
    values = q.dequantize(torch.float32)
    assert_bytes_equal(values, quantize(x, "nvfp4", outer="pow2").dequantize(torch.float32))
    again = x.float() / q.scales.float().repeat_interleave(16, -1)
    assert again.isfinite().all()


def test_an_expert_with_amax_0_goes_into_a_layout_of_divisors(tmp_path):
    """Its codes are whatever they are; its values are 0, and must not become NaN."""
    q = quantize(weight(2, 64, 64), "nvfp4", outer="expert")
    name = "m.experts.w2_weight"
    pieces = {name: q.codes, f"{name}_scale": q.scales, f"{name}_amax": torch.tensor([0.0, 2.0])}
    folder_of(tmp_path / "in", pieces | {f"{name}_outer_scale_denominator": torch.tensor(2688.0)})
    convert_checkpoint(tmp_path / "in", tmp_path / "out", "compressed-tensors")
    raw = load_file(tmp_path / "out/model.safetensors")
    assert raw["m.experts.0.down_proj.weight_global_scale"].item() == 1
    assert not load(tmp_path / "out")["m.experts.0.down_proj.weight"].dequantize(torch.float32).any()


def test_what_is_not_finite_is_refused_by_name(tmp_path):
    for value in (float("nan"), float("inf")):
        x = dense_model()
        x["model.layers.0.mlp.up_proj.weight"][3, 3] = value
        for how in ({}, {"policy": "mxfp8"}):
            with pytest.raises(Refused, match="'model.layers.0.mlp.up_proj.weight' holds NaN or infinity"):
                save(x, tmp_path / "out", **how)
    assert not any(tmp_path.iterdir())


# Calibration, other files


@pytest.mark.parametrize("layout, piece, of", [
    ("compressed-tensors", "a.input_global_scale", lambda amax: 2688 / amax),
    ("modelopt", "a.input_scale", lambda amax: amax / 2688),
])  # fmt: skip
def test_input_amax(layout, piece, of, tmp_path):
    save({"a.weight": weight(64, 64)}, tmp_path / "out", layout, input_amax={"a": 4.0})
    raw = load_file(tmp_path / "out/model.safetensors")
    assert raw[piece].item() == pytest.approx(of(4.0), rel=1e-6)
    assert load(tmp_path / "out").weight("a.weight").input_amax.item() == pytest.approx(4.0, rel=1e-6)
    other = "modelopt" if layout == "compressed-tensors" else "compressed-tensors"
    convert_checkpoint(tmp_path / "out", tmp_path / "new", other)
    assert load(tmp_path / "new").weight("a.weight").input_amax.item() == pytest.approx(4.0, rel=1e-6)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert "input_activations" in config["config_groups"]["group_0"] and config.get("quant_algo", "NVFP4") == "NVFP4"


def test_side_files_come_along_and_code_does_not(tmp_path):
    folder = folder_of(tmp_path / "in", {"a.weight": weight(64, 64)}, {"model_type": "x"})
    for name in ("tokenizer.json", "LICENSE", "modeling_x.py", "pytorch_model.bin", ".hidden"):
        (folder / name).write_text("{}")
    save(folder, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "fp4ext.json", "tokenizer.json", "LICENSE"}
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "x"


# Refusals before anything is written


STACK = {"m.experts.w2_weight": weight(2, 64, 64)}
BY_EXPERT = {"m.experts.down_proj": quantize(weight(2, 64, 64), "nvfp4", outer="expert")}
BY_ROW = {"a.weight": quantize(weight(64, 64), "nvfp4", outer="row")}

REFUSALS = {
    "unknown layout 'ggml'; accepted: compressed-tensors, modelopt": ({"layout": "ggml"}, None),
    "unknown policy 'int4'; policies: bf16": ({"policy": "int4"}, None),
    "policy nvfp4/amax/stochastic": ({"policy": "nvfp4/amax/stochastic"}, None),
    "policy bf16 quantizes no weight": ({"policy": "bf16"}, None),
    "inkling holds nvfp4, not mxfp8": ({"policy": "mxfp8", "layout": "inkling"}, STACK),
    "has one outer scale a matrix": ({"policy": "nvfp4/amax/nearest/1x16/row"}, None),
    "no weight would be quantized": ({}, {"a.bias": weight(64)}),
    "source is int; accepted: a module, a checkpoint's path": ({}, 3),
    "weight 3 is Tensor; accepted: a name": ({}, {3: weight(64, 64)}),
    "gpt-oss holds mxfp4, not nvfp4": ({"layout": "gpt-oss"}, BY_EXPERT),
    "does not fit into compressed-tensors": ({}, {"a.weight": quantize(weight(64, 40), "nvfp4")}),
    "does not fit into modelopt": ({"layout": "modelopt"}, BY_ROW),
    "names end with .weight": ({}, {"a": quantize(weight(64, 64), "nvfp4")}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message, tmp_path):
    how, source = REFUSALS[message]
    with pytest.raises(Refused) as error:
        save(dense_model() if source is None else source, tmp_path / "out", **how)
    assert message in str(error.value) and not any(tmp_path.iterdir())


def test_requantize(tmp_path):
    """Where the layout lacks the format: anew, and said so."""
    source, _ = experts("alternating")
    save(source, tmp_path / "a", "inkling2")
    with pytest.raises(Refused, match="gpt-oss holds mxfp4, not nvfp4; accepted: another layout, or requantize"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "gpt-oss")
    report = convert_checkpoint(tmp_path / "a", tmp_path / "b", "gpt-oss", requantize=True)
    assert set(report.lost.values()) == {"quantized anew, nvfp4 → mxfp4"} and len(report.lost) == 2
    w = load(tmp_path / "a")["m.experts.w2_weight"].dequantize(torch.float32)
    same(load(tmp_path / "b")["m.experts.down_proj"], quantize(w, MXFP4))


def test_an_outer_scale_without_a_divisor(tmp_path):
    """2^-149 has no fp32 reciprocal. It is refused where it would be needed, by name."""
    q = quantize(weight(64, 64), "nvfp4")
    pieces = {"a.weight": q.codes, "a.weight_scale": q.scales, "a.weight_scale_2": torch.tensor(2.0**-149)}
    folder_of(tmp_path / "in", pieces)
    with pytest.raises(Refused, match="'a.weight': outer scale 1.4e-45 has no fp32 divisor"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()


def test_convert_refuses_what_is_not_quantized(tmp_path):
    with pytest.raises(Refused, match="nothing in it is quantized"):
        convert_checkpoint(folder_of(tmp_path / "in", dense_model()), tmp_path / "out", "modelopt")


def test_matrices_in_a_layout_of_experts_become_bf16(tmp_path):
    """Exactly, where the outer scale is a power of two."""
    x = {"a.weight": quantize(weight(64, 64), SWEEP), "m.experts.w2_weight": weight(2, 64, 64)}
    report = save(x, tmp_path / "out", "inkling2")
    assert not report.lost
    assert_bytes_equal(load(tmp_path / "out")["a.weight"].float(), x["a.weight"].dequantize(torch.float32))
    x["a.weight"] = quantize(weight(64, 64), "nvfp4", scale="sweep")
    assert "rounded to BF16" in save(x, tmp_path / "two", "inkling2").lost["a.weight"]


def test_a_bar_where_somebody_looks(tmp_path, capsys):
    """On stderr, and only if asked or on a terminal; results on stdout stay clean."""
    save(dense_model(), tmp_path / "a", progress=True)
    inspect(tmp_path / "a", progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and ("MB" in shown.err or "kB" in shown.err or "bytes" in shown.err)
    save(dense_model(), tmp_path / "b")
    assert capsys.readouterr() == ("", "")
