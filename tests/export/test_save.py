"""save: what is quantized, how it is named and shared, what is kept; and that it happens whole or not at all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fp4ext
from fp4ext import Policy, QTensor, Spec, quantize
from fp4ext.export import LAYOUTS, Refused, convert, inspect, load, save
from fp4ext.testing import assert_bytes_equal, generate

from .judges import mixed
from .models import folder_of, plain

SWEEP = Spec("nvfp4", "sweep", outer="pow2")
MXFP4 = Spec("mxfp4")


def weight(*shape, seed=0):
    return generate("student_t3", *shape, seed=seed, dtype=torch.bfloat16)


def same(a: QTensor, b: QTensor):
    assert a.format is b.format and a.shape == b.shape
    for name, t in a.tensors().items():
        assert_bytes_equal(t, b.tensors()[name], name)


def dense_model():
    """Names of every kind."""
    return {
        "model.embed_tokens.weight": weight(80, 64),
        "model.layers.0.self_attn.q_proj.weight": weight(64, 64, seed=1),
        "model.layers.0.self_attn.k_proj.weight": weight(32, 64, seed=2) * 3,
        "model.layers.0.self_attn.v_proj.weight": weight(32, 64, seed=3) / 8,
        "model.layers.0.self_attn.q_proj.bias": weight(64),
        "model.layers.0.self_attn.o_proj.weight": weight(64, 64, seed=4),
        "model.layers.0.mlp.gate_proj.weight": weight(96, 64, seed=5),
        "model.layers.0.mlp.up_proj.weight": weight(96, 64, seed=6) * 9,
        "model.layers.0.mlp.down_proj.weight": weight(64, 96, seed=7),
        "model.layers.0.mlp.gate.weight": weight(64, 64, seed=8),
        "model.layers.0.conv.weight": weight(64, 1, 4),
        "model.layers.0.norm.weight": weight(64),
        "model.layers.0.tiny.weight": weight(8, 64),
        "model.layers.0.odd.weight": weight(64, 40),
        "model.layers.0.half.weight": weight(64, 64).double(),
        "lm_head.weight": weight(80, 64, seed=9),
    }


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
    report = convert(tmp_path / "in", tmp_path / "out", "modelopt")
    assert "weight_scale_2 is rounded to fp32" in report.lost["a.weight"]
    scale_2 = load_file(tmp_path / "out" / "model.safetensors")["a.weight_scale_2"]
    assert scale_2.shape == () and scale_2.item() == pytest.approx(1 / 3584, rel=1e-7)
    convert(tmp_path / "in", tmp_path / "back", "compressed-tensors")
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
    """Converted layers by theirs; what is no linear layer is left, whatever its name; weights tied or not."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 48), "e": nn.Embedding(64, 64)})
    model["c"] = nn.Linear(64, 64, bias=False)
    model["c"].weight = model["a"].weight
    fp4ext.convert(model, "nvidia", filter=lambda name, module: name == "b")
    report = save(model, tmp_path / "out")
    out = load(tmp_path / "out")
    assert report.quantized == dict.fromkeys(["a.weight", "b.weight", "c.weight"], "nvfp4")
    assert report.left == {"e.weight": "not a linear layer's weight"}
    same(out["b.weight"], quantize(model["b"].weight, "nvfp4", scale="amax", outer="pow2"))
    same(out["a.weight"], quantize(model["a"].weight, SWEEP))
    same(out["a.weight"], out["c.weight"])
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["ModuleDict"]


def test_qtensors_are_written_as_they_are(tmp_path):
    q = quantize(weight(64, 64), "nvfp4", outer="tensor")
    save({"a.weight": q}, tmp_path / "out", "modelopt")
    same(load(tmp_path / "out")["a.weight"], q)


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


@pytest.mark.parametrize("layout", ["inkling", "inkling2", "fp4ext"])
def test_a_dead_expert(layout, tmp_path):
    x = weight(3, 64, 64)
    x[1] = 0
    save({"m.experts.w2_weight": x}, tmp_path / "out", layout)
    q = load(tmp_path / "out")["m.experts.w2_weight"]
    assert q.global_scale.shape == (3, 1, 1) and (q.global_scale > 0).all()
    assert not q.dequantize(torch.float32)[1].any() and q.dequantize(torch.float32)[2].any()


def test_an_expert_with_amax_0_goes_into_a_layout_of_divisors(tmp_path):
    """Its codes are whatever they are; its values are 0, and must not become NaN."""
    q = quantize(weight(2, 64, 64), "nvfp4", outer="expert")
    name = "m.experts.w2_weight"
    pieces = {name: q.codes, f"{name}_scale": q.scales, f"{name}_amax": torch.tensor([0.0, 2.0])}
    folder_of(tmp_path / "in", pieces | {f"{name}_outer_scale_denominator": torch.tensor(2688.0)})
    convert(tmp_path / "in", tmp_path / "out", "compressed-tensors")
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


# Experts, in every arrangement


def experts(arrangement: str, alternating=False):
    """One layer's experts, 3 of [2·32 × 64] and [64 × 32], and the plain weight of each projection."""
    gate, up, down = weight(3, 32, 64, seed=1), weight(3, 32, 64, seed=2) * 4, weight(3, 64, 32, seed=3)
    truth = {f"m.experts.{e}.{part}.weight": t[e] for e in range(3) for part, t in
             (("gate_proj", gate), ("up_proj", up), ("down_proj", down))}  # fmt: skip
    halves, rows = torch.cat((gate, up), 1), torch.stack((gate, up), 2).reshape(3, 64, 64)
    source = {
        "separate": truth,
        "w123": {
            n.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2"): t
            for n, t in truth.items()
        },  # fmt: skip
        "stacked": {"m.experts.gate_up_proj": halves, "m.experts.down_proj": down},
        "alternating": {"m.experts.w13_weight": rows, "m.experts.w2_weight": down},
        "gpt-oss": {"m.experts.gate_up_proj": rows.mT, "m.experts.down_proj": down.mT},
    }
    return source[arrangement], truth


PAIR = ("gate_proj", "up_proj")


def projections(out) -> dict[str, torch.Tensor]:
    """The decoded weight of each projection, whatever arrangement the checkpoint has."""
    found = {}
    for name, q in out.items():
        w = q.dequantize(torch.float32)
        part = name.split(".")[-2] if name.endswith(".weight") else name.rpartition(".")[2]
        if part in ("w13_weight", "gate_up_proj"):
            in_halves = out.layout.name == "fp4ext" and part == "gate_up_proj"
            halves = w.chunk(2, 1) if in_halves else w.unflatten(1, (-1, 2)).unbind(2)
            for half, t in zip(PAIR, halves, strict=True):
                found |= {f"m.experts.{e}.{half}.weight": t[e] for e in range(3)}
        elif w.dim() == 3:
            found |= {f"m.experts.{e}.down_proj.weight": w[e] for e in range(3)}
        else:
            named = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part, part)
            found[name.replace(f".{part}.", f".{named}.")] = w
    return found


ARRANGEMENTS = ["separate", "w123", "stacked", "alternating", "gpt-oss"]
HOLDS = {"gpt-oss": MXFP4}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_experts(arrangement, layout, tmp_path):
    """Every arrangement goes into every layout: each projection decodes to what it quantizes to by itself."""
    source, truth = experts(arrangement)
    config = {"model_type": "gpt_oss"} if arrangement == "gpt-oss" else {}
    report = save(folder_of(tmp_path / "in", source, config), tmp_path / "out", layout)
    assert not report.left
    out = load(tmp_path / "out")
    found = projections(out)
    assert found.keys() == truth.keys()
    spec = HOLDS.get(layout, SWEEP)
    for name, w in truth.items():
        half = next((half for half in PAIR if half in name), None)
        group = [truth[name.replace(half, other)] for other in PAIR] if half else [w]
        amax = torch.stack([t.abs().max() for t in group]).max().float() if spec is SWEEP else None
        assert_bytes_equal(found[name] + 0.0, quantize(w, spec, amax=amax).dequantize(torch.float32) + 0.0, name)


CHAINS = [
    ("compressed-tensors", "inkling2"),
    ("inkling", "compressed-tensors"),
    ("inkling2", "modelopt"),
    ("inkling2", "inkling"),
    ("modelopt", "compressed-tensors"),
    ("inkling2", "fp4ext"),
    ("fp4ext", "inkling"),
]


@pytest.mark.parametrize("one, other", CHAINS)
def test_there_and_back_is_the_same_file(one, other, tmp_path):
    source, _ = experts("alternating")
    save(source, tmp_path / "a", one)
    forth = convert(tmp_path / "a", tmp_path / "b", other)
    back = convert(tmp_path / "b", tmp_path / "c", one)
    assert not forth.lost and not back.lost and not forth.left
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in "ac")
    assert before.keys() == after.keys()
    for name, t in before.items():
        assert_bytes_equal(after[name], t, name)


@pytest.mark.parametrize("other", ["fp4ext", "compressed-tensors"])
def test_gpt_oss_there_and_back(other, tmp_path):
    """Its rows alternate under a name that elsewhere promises halves."""
    source, _ = experts("gpt-oss")
    save(folder_of(tmp_path / "in", source, {"model_type": "gpt_oss"}), tmp_path / "a", "gpt-oss")
    convert(tmp_path / "a", tmp_path / "b", other)
    convert(tmp_path / "b", tmp_path / "c", "gpt-oss")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "c/model.safetensors").read_bytes()


def test_outer_scales_that_differ_do_not_stack(tmp_path):
    x = {f"m.experts.0.{part}.weight": quantize(weight(32, 64, seed=i) * 100**i, SWEEP)
         for i, part in enumerate(("gate_proj", "up_proj"))}  # fmt: skip
    with pytest.raises(Refused, match="gate and up of an expert have outer scales that differ"):
        save(x, tmp_path / "out", "inkling2")
    assert not (tmp_path / "out").exists()


def test_experts_of_a_stack_are_quantized_alike(tmp_path):
    source, _ = experts("separate")
    with pytest.raises(Refused, match="would be in one stack, and are not quantized alike"):
        save(source, tmp_path / "out", "inkling2", filter=lambda name, shape: ".1." not in name)
    with pytest.raises(Refused, match="would be in one stack"):
        save(source, tmp_path / "out", "inkling2", policy=mixed(pattern="*.2.down_proj"))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("one, other", [("inkling2", "modelopt"), ("compressed-tensors", "inkling2")])
def test_mxfp8_experts_there_and_back(one, other, tmp_path):
    source, truth = experts("stacked")
    save(source, tmp_path / "a", one, policy="mxfp8")
    convert(tmp_path / "a", tmp_path / "b", other)
    convert(tmp_path / "b", tmp_path / "c", one)
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in "ac")
    assert before.keys() == after.keys()
    for name, t in before.items():
        assert_bytes_equal(after[name], t, name)
    for name, w in projections(load(tmp_path / "b")).items():
        assert_bytes_equal(w, quantize(truth[name], "mxfp8").dequantize(torch.float32), name)


def test_a_missing_expert_is_named(tmp_path):
    source, _ = experts("separate")
    del source["m.experts.1.down_proj.weight"]
    with pytest.raises(Refused, match=r"m.experts: experts \[0, 2\]"):
        save(source, tmp_path / "out", "inkling2")


def test_the_amax_that_is_stored(tmp_path):
    """amax/denominator is the outer scale, bit for bit, whatever the outer scale is."""
    for i, spec in enumerate((SWEEP, Spec("nvfp4", "amax", outer="expert"), Spec("nvfp4", "sweep", outer="expert"))):
        x = weight(40, 32, 32, seed=i)
        report = save({"m.experts.w2_weight": x}, tmp_path / f"{i}", "inkling2", policy=spec)
        assert not report.lost
        raw = load_file(tmp_path / f"{i}" / "model.safetensors")
        got = raw["m.experts.w2_weight_amax"] / raw["m.experts.w2_weight_outer_scale_denominator"]
        wanted = torch.stack([quantize(e, spec.with_(outer="tensor") if i else spec).global_scale for e in x])
        assert_bytes_equal(got, wanted)
        assert raw["m.experts.w2_weight_outer_scale_denominator"].shape == ()
        if i == 0:
            assert_bytes_equal(raw["m.experts.w2_weight_amax"], raw["m.experts.w2_weight_amax"].bfloat16().float())


# Against stored scales


@pytest.mark.parametrize("policy", ["end_to_end", "nvfp4/four_over_six", "mxfp8", "mxfp4", "nvidia"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unchanged_weights_keep_their_bytes(policy, dtype, tmp_path):
    """From the decoded weights, in the dtype that a trainer holds: the very same file. The rule need not be known."""
    source = dense_model()
    save(source, tmp_path / "a", policy=policy)
    decoded = {n: w.dequantize(dtype) if isinstance(w, QTensor) else w for n, w in load(tmp_path / "a").items()}
    report = save(decoded, tmp_path / "b", policy=policy, like=tmp_path / "a")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert not report.clipped
    name = "model.layers.0.mlp.down_proj.weight"
    at = int(decoded[name][5].nonzero()[0])
    decoded[name][5, at] *= -1
    decoded[name][6, 0] = 1e4
    report = save(decoded, tmp_path / "c", policy=policy, like=tmp_path / "a")
    old, new = (load(tmp_path / x)[name].dequantize(torch.float32) for x in "ac")
    assert {tuple(where) for where in (old != new).nonzero().tolist()} == {(5, at), (6, 0)}
    assert report.clipped == {name: 1} and "1 elements in 1 weights were clipped" in str(report)


def test_against_is_the_quantizers_rounding(tmp_path):
    """New weights in their own stored scales: the quantizer's codes again, ties and signs of zero included."""
    from fp4ext.export.against import against
    from fp4ext.export.stored import Stored

    for kind in ("gaussian", "student_t3", "integers", "zeros", "wide"):
        for spec in (SWEEP, Spec("nvfp4"), Spec("nvfp4", outer="row"), Spec("mxfp8"), Spec("mxfp8_e5m2"), MXFP4):
            x = generate(kind, 48, 128, seed=3)
            q = quantize(x, spec)
            made, clipped = against(x, Stored.of(q))
            values = (made.q.dequantize(torch.float32), q.dequantize(torch.float32))
            assert_bytes_equal(values[0] + 0.0, values[1] + 0.0, f"{kind} {spec}")
    with pytest.raises(ValueError, match=r"accepted: \(48, 128\)"):
        against(x[1:], Stored.of(q))


def test_like_must_be_of_the_same_layout(tmp_path):
    save(dense_model(), tmp_path / "a", "modelopt")
    with pytest.raises(Refused, match="like is in layout modelopt; accepted: compressed-tensors"):
        save(dense_model(), tmp_path / "b", like=tmp_path / "a")


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
    convert(tmp_path / "out", tmp_path / "new", other)
    assert load(tmp_path / "new").weight("a.weight").input_amax.item() == pytest.approx(4.0, rel=1e-6)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert "input_activations" in config["config_groups"]["group_0"] and config.get("quant_algo", "NVFP4") == "NVFP4"


def test_side_files_come_along_and_code_does_not(tmp_path):
    folder = folder_of(tmp_path / "in", {"a.weight": weight(64, 64)}, {"model_type": "x"})
    for name in ("tokenizer.json", "LICENSE", "modeling_x.py", "pytorch_model.bin", ".hidden"):
        (folder / name).write_text("{}")
    save(folder, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "LICENSE"}
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
        convert(tmp_path / "a", tmp_path / "b", "gpt-oss")
    report = convert(tmp_path / "a", tmp_path / "b", "gpt-oss", requantize=True)
    assert set(report.lost.values()) == {"quantized anew, nvfp4 → mxfp4"} and len(report.lost) == 2
    w = load(tmp_path / "a")["m.experts.w2_weight"].dequantize(torch.float32)
    same(load(tmp_path / "b")["m.experts.down_proj"], quantize(w, MXFP4))


def test_an_outer_scale_without_a_divisor(tmp_path):
    """2^-149 has no fp32 reciprocal. It is refused where it would be needed, by name."""
    q = quantize(weight(64, 64), "nvfp4")
    pieces = {"a.weight": q.codes, "a.weight_scale": q.scales, "a.weight_scale_2": torch.tensor(2.0**-149)}
    folder_of(tmp_path / "in", pieces)
    with pytest.raises(Refused, match="'a.weight': outer scale 1.4e-45 has no fp32 divisor"):
        convert(tmp_path / "in", tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()


def test_convert_refuses_what_is_not_quantized(tmp_path):
    with pytest.raises(Refused, match="nothing in it is quantized"):
        convert(folder_of(tmp_path / "in", dense_model()), tmp_path / "out", "modelopt")


def test_matrices_in_a_layout_of_experts_become_bf16(tmp_path):
    """Exactly, where the outer scale is a power of two."""
    x = {"a.weight": quantize(weight(64, 64), SWEEP), "m.experts.w2_weight": weight(2, 64, 64)}
    report = save(x, tmp_path / "out", "inkling2")
    assert not report.lost
    assert_bytes_equal(load(tmp_path / "out")["a.weight"].float(), x["a.weight"].dequantize(torch.float32))
    x["a.weight"] = quantize(weight(64, 64), "nvfp4", scale="sweep")
    assert "rounded to BF16" in save(x, tmp_path / "two", "inkling2").lost["a.weight"]


# Whole or not at all


def test_a_target_that_is_taken(tmp_path):
    out, x = tmp_path / "out", {"a.weight": weight(64, 64)}
    out.mkdir()
    save(x, out)  # empty: fine
    with pytest.raises(Refused, match="holds a checkpoint; accepted: .* overwrite"):
        save(x, out)
    save({"b.weight": weight(64, 64)}, out, overwrite=True)
    assert list(load(out)) == ["b.weight"] and [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(Refused, match="holds other files"):
            save(x, tmp_path / "mine", overwrite=overwrite)
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="not a folder"):
        save(x, tmp_path / "file")
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(Refused, match="not a folder"):
        save(x, tmp_path / "link", overwrite=True)


def test_the_source_may_be_overwritten(tmp_path):
    folder_of(tmp_path / "in", dense_model())
    save(tmp_path / "in", tmp_path / "in", overwrite=True)
    assert load(tmp_path / "in").layout.name == "compressed-tensors"


@pytest.mark.parametrize("at", ["save_file", "rename", "publish", "fsync"])
def test_a_disk_that_gives_out(at, tmp_path, monkeypatch):
    """At any step: the old checkpoint is whole, nothing else is left."""
    from fp4ext.export import writer

    out = tmp_path / "out"
    save({"a.weight": weight(64, 64)}, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    where = {"save_file": (writer, "save_file"), "publish": (writer, "publish")}.get(at, (os, at))
    monkeypatch.setattr(*where, full)
    with pytest.raises(OSError, match="No space left"):
        save(dense_model(), out, overwrite=True, shard=10_000)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_in_the_middle(tmp_path):
    """SIGKILL while shards are written over a checkpoint: the old one stays whole."""
    out = tmp_path / "out"
    save({"a.weight": weight(64, 64)}, out)
    before = (out / "model.safetensors").read_bytes()
    w = weight(512, 1024)
    big = folder_of(tmp_path / "in", {f"l.{i}.weight": w.clone() for i in range(40)})
    code = f"import fp4ext.export as e; e.save({str(big)!r}, {str(out)!r}, shard=1<<20, overwrite=True)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(fp4ext.__file__).parent.parent)
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob(".out.writing-*/shard-3")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (out / "model.safetensors").read_bytes() == before and list(load(out)) == ["a.weight"]


def test_shards_and_index(tmp_path):
    report = save(dense_model(), tmp_path / "out", shard=8_000)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 4 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.bytes and set(index["weight_map"].values()) == set(shards)
    save(dense_model(), tmp_path / "one")
    one, many = load(tmp_path / "one"), load(tmp_path / "out")
    for name, w in one.items():
        same(many[name], w) if isinstance(w, QTensor) else assert_bytes_equal(many[name], w)
    native = save(dense_model(), tmp_path / "native", "fp4ext", shard=8_000)
    assert native.quantized["model.layers.0.odd.weight"] == "nvfp4"  # padded inside: only here
    for name, w in load(tmp_path / "native").items():
        if name != "model.layers.0.odd.weight":
            same(w, one[name]) if isinstance(w, QTensor) else assert_bytes_equal(w, one[name])


PEAK = """
import torch, fp4ext.export as export
torch.set_num_threads(1)
policy = "nvfp4/amax/nearest/1x16/pow2"
export.save({{"a.weight": torch.randn(64, 64).bfloat16()}}, {small!r}, policy=policy)
def peak():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
open("/proc/self/clear_refs", "w").write("5")
before = peak()
export.save({source!r}, {out!r}, policy=policy, shard=8 << 20)
print(peak() - before)
"""


PARTS = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]


@pytest.mark.slow
def test_memory_is_a_shard_and_a_layer(tmp_path):
    """A checkpoint of 235 MB goes through less than 38 MB: a shard of 8 MiB and a layer of 7 matrices, 29 MB.

    Peak resident memory over that after a first small export, in a process of its own.
    """
    w, folder, weight_map = weight(1024, 2048), tmp_path / "in", {}
    folder.mkdir()
    for i in range(8):
        shard, names = f"model-{i:05}.safetensors", [f"l.{i}.{part}.weight" for part in PARTS]
        save_file({name: w.clone() for name in names}, folder / shard)
        weight_map |= dict.fromkeys(names, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    limit, size = (8 << 20) + 7 * w.nbytes, sum(path.stat().st_size for path in folder.iterdir())
    assert size > 6 * limit
    paths = {"small": tmp_path / "small", "source": folder, "out": tmp_path / "out"}
    script = PEAK.format(**{name: str(path) for name, path in paths.items()})
    here = Path(fp4ext.__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=here)
    assert run.returncode == 0, run.stderr
    used = int(run.stdout)
    print(f"{used / 1e6:.1f} MB of {limit / 1e6:.1f}")
    assert 8e6 < used <= limit, f"{used / 1e6:.1f} MB, accepted: {limit / 1e6:.1f}"
    assert inspect(tmp_path / "out").bits == pytest.approx(4.5, abs=0.01)


def test_policy_objects_and_specs_are_the_same_thing(tmp_path):
    both = fp4ext.Recipe(fp4ext.Fprop(SWEEP, SWEEP))
    for i, policy in enumerate(("end_to_end", SWEEP, SWEEP.key, Policy("mine", both))):
        save(dense_model(), tmp_path / f"{i}", policy=policy)
    first = (tmp_path / "0/model.safetensors").read_bytes()
    assert (tmp_path / "3/model.safetensors").read_bytes() == first
    # A spec for all leaves no module out by name.
    assert load(tmp_path / "1").format("model.layers.0.mlp.gate.weight") is not None
    assert (tmp_path / "1/model.safetensors").read_bytes() == (tmp_path / "2/model.safetensors").read_bytes()


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
    assert {name.split(".")[3]: fmt for name, fmt in report.quantized.items()} == {"mlp": "mxfp8", "self_attn": "nvfp4"}
