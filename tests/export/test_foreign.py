"""Checkpoints as other tools write them: swizzled scales, rotations, KV caches, input scales, kinds not read."""

import json

import pytest
import torch
from safetensors.torch import save_file

import fp4ext
from fp4ext import Spec, quantize
from fp4ext.cli import main
from fp4ext.export import Refused, Stored, convert_checkpoint, inspect, load, save
from fp4ext.testing import assert_bytes_equal

from .models import folder_of
from .weights import SWEEP, same, weight

U8 = torch.uint8
PLAIN = {"m.norm.weight": torch.ones(64)}


def modelopt(q, prefix="m.w", **more):
    pieces = {"weight": q.codes, "weight_scale": q.scales, "weight_scale_2": q.global_scale.reshape(()), **more}
    return {f"{prefix}.{part}": t for part, t in pieces.items()}


# Swizzled block scales


def swizzled(pieces):
    """By modelopt's own function."""
    from modelopt.torch.export.diffusers_utils import swizzle_nvfp4_scales

    return swizzle_nvfp4_scales({name: t.clone() for name, t in pieces.items()})


def marker(**about):
    return torch.tensor(list(json.dumps(about).encode()), dtype=U8)


def layers(*names, fmt="nvfp4"):
    return json.dumps({"format_version": "1.0", "layers": {name: {"format": fmt} for name in names}})


SIZES = [(128, 64), (256, 192), (96, 64), (200, 112), (16, 16), (128, 320)]


@pytest.mark.parametrize("n, k", SIZES)
def test_modelopts_files_for_comfyui(n, k, tmp_path):
    q = quantize(weight(n, k), SWEEP)
    tensors = swizzled(modelopt(q)) | PLAIN
    about = {"_quantization_metadata": layers("m.w"), "quantization_config": json.dumps({"quant_algo": "NVFP4"})}
    save_file(tensors, tmp_path / "m.safetensors", about)
    checkpoint = load(tmp_path / "m.safetensors")
    assert checkpoint.shape("m.w.weight") == (n, k)
    same(checkpoint["m.w.weight"], q)
    convert_checkpoint(tmp_path / "m.safetensors", tmp_path / "out", "compressed-tensors")
    same(load(tmp_path / "out")["m.w.weight"], q)
    assert not inspect(tmp_path / "m.safetensors").faults


@pytest.mark.parametrize("n, k", SIZES)
def test_comfyuis_own_files(n, k, tmp_path):
    """Swizzled too, and the even element is in the high nibble."""
    q = quantize(weight(n, k), SWEEP)
    pieces = swizzled(modelopt(q)) | {"m.w.comfy_quant": marker(format="nvfp4")} | PLAIN
    pieces["m.w.weight"] = q.codes << 4 | q.codes >> 4
    save_file(pieces, tmp_path / "m.safetensors")
    same(load(tmp_path / "m.safetensors")["m.w.weight"], q)
    convert_checkpoint(tmp_path / "m.safetensors", tmp_path / "out", "modelopt")
    same(load(tmp_path / "out")["m.w.weight"], q)
    assert "m.w.comfy_quant" not in load(tmp_path / "out").folder.slots


def test_fp8_in_comfyuis_files(tmp_path):
    codes = torch.randn(32, 64).to(torch.float8_e4m3fn)
    pieces = {"a.weight": codes, "a.weight_scale": torch.tensor(0.5), "a.comfy_quant": marker(format="float8_e4m3fn")}
    save_file(pieces | PLAIN, tmp_path / "m.safetensors")
    assert_bytes_equal(load(tmp_path / "m.safetensors")["a.weight"].dequantize(torch.float32), codes.float() / 2)


COMFY = {
    "says format 'int8_tensorwise'; accepted: nvfp4": (marker(format="int8_tensorwise"), None),
    "says 'convrot': its weights want rotated inputs": (marker(format="nvfp4", convrot=True), None),
    "m.w.comfy_quant' says format None": (marker(x=1), None),
    "m.w.comfy_quant' takes 5000 bytes": (torch.zeros(5000, dtype=U8), None),
    "not valid JSON": (torch.zeros(5, dtype=U8), None),
    "nothing says which nibble is the even element": (None, layers("m.w")),
    "_quantization_metadata of 'm.w' says format 'mxfp8'": (None, layers("m.w", fmt="mxfp8")),
    "_quantization_metadata has no layers": (None, "[]"),
}


@pytest.mark.parametrize("message", COMFY)
def test_what_comfyui_may_say_and_is_not_read(message, tmp_path):
    said, metadata = COMFY[message]
    pieces = swizzled(modelopt(quantize(weight(128, 64), SWEEP))) | PLAIN
    pieces |= {} if said is None else {"m.w.comfy_quant": said}
    save_file(pieces, tmp_path / "m.safetensors", {} if metadata is None else {"_quantization_metadata": metadata})
    with pytest.raises(Refused) as error:
        dict(load(tmp_path / "m.safetensors"))
    assert message in str(error.value)


# Refused by name


def ct(q, prefix="m.w", **more):
    pieces = {"weight_packed": q.codes, "weight_scale": q.scales, "weight_global_scale": 1 / q.global_scale.reshape(1)}
    return {f"{prefix}.{part}": t for part, t in (pieces | more).items()}


CODES = quantize(weight(64, 64), SWEEP).codes
BYTES = torch.full((64, 2), 127, dtype=U8)
ROTATED = {"config_groups": {"R1": {"type": "hadamard"}}}
NAMED = {
    "has a transform_config: its weights want inputs that are rotated": (
        ct(quantize(weight(64, 64), SWEEP)), {"quant_method": "compressed-tensors", "transform_config": ROTATED}),
    "says quant_method 'gptq'; accepted: compressed-tensors, modelopt": (
        {"m.w.qweight": torch.zeros(8, 64, dtype=torch.int32)}, {"quant_method": "gptq"}),
    "says format 'pack-quantized'; accepted: dense": (
        {"m.w.weight_packed": torch.zeros(8, 64, dtype=torch.int32)},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"format": "pack-quantized"}}}),
    "NVFP4 experts as modelopt exports those of gpt-oss": (
        {"m.experts.gate_up_proj": torch.stack([CODES] * 2),
         "m.experts.gate_up_proj_weight_scale": torch.ones(2, 64, 4).to(torch.float8_e4m3fn),
         "m.experts.gate_up_proj_weight_scale_2": torch.ones(2)}, None),
    "int8 codes with float8_e8m0fnu scales 'm.w.scale', FP4 as DeepSeek stores it": (
        {"m.w.weight": CODES.view(torch.int8), "m.w.scale": BYTES.view(torch.float8_e8m0fnu)}, None),
    "m.w.weight_scale' is uint8, where NVFP4 has float8_e4m3fn": (
        {"m.w.weight_packed": CODES, "m.w.weight_scale": torch.full((64, 4), 127, dtype=U8)}, None),
    "m.w.weight_scale' is uint8, where NVFP4": (
        {"m.w.weight_packed": CODES, "m.w.weight_scale": BYTES, "m.w.weight_global_scale": torch.ones(1)}, None),
    "'m.w.weight' is not there; found m.w.weight_scale": (
        {"m.w.weight_scale": BYTES, "m.w.weight_scale_2": torch.ones(1)}, None),
    "int8 codes with float32 scales 'm.w.weight_scale'": (
        {"m.w.weight": CODES.view(torch.int8), "m.w.SCB": torch.ones(64), "m.w.weight_scale": torch.ones(64, 1)}, None),
}  # fmt: skip


@pytest.mark.parametrize("message", NAMED)
def test_refused_by_name(message, tmp_path):
    pieces, about = NAMED[message]
    folder_of(tmp_path, pieces | PLAIN, None if about is None else {"quantization_config": about})
    with pytest.raises(Refused) as error:
        dict(load(tmp_path))
    assert message in str(error.value)


def test_a_rotation_of_a_part_is_seen_too(tmp_path):
    about = {"quant_method": "compressed-tensors", "transform_config": ROTATED}
    folder_of(tmp_path, ct(quantize(weight(64, 64), SWEEP)), {"text_config": {"quantization_config": about}})
    with pytest.raises(Refused, match="has a transform_config"):
        load(tmp_path)


@pytest.mark.parametrize("layout", ["fp4ext", "modelopt"])
def test_metadata_that_is_not_kept_is_reported(layout, tmp_path):
    save_file({"m.w.weight": weight(64, 64)}, tmp_path / "m.safetensors", {"format": "pt", "author": "a"})
    report = save(tmp_path / "m.safetensors", tmp_path / "out", layout)
    assert report.aside == {"metadata 'author'": "metadata of the files"} and "not copied: metadata" in str(report)
    assert not convert_checkpoint(tmp_path / "out", tmp_path / "two", layout).aside


MX8 = quantize(weight(64, 64), "mxfp8")


def test_weights_that_decode_to_infinity_are_refused(tmp_path):
    scales = MX8.scales.view(U8).clone()
    scales[3, 1] = 254
    q = quantize(weight(64, 64), SWEEP)
    five = quantize(weight(64, 64), "mxfp8_e5m2")
    codes = five.codes.view(U8).clone()
    codes[0, 0] = 0x7C
    folder_of(tmp_path / "0", {"m.w.weight": MX8.codes, "m.w.weight_scale": scales})
    folder_of(tmp_path / "1", modelopt(q) | {"m.w.weight_scale_2": torch.tensor(3e38)})
    tensors, metadata = fp4ext.QTensor(codes.view(five.codes.dtype), *five.stored()[1:2], None, five.format, five.shape
                                       ).to_safetensors("m.w.weight")  # fmt: skip
    (tmp_path / "2").mkdir()
    save_file(tensors, tmp_path / "2" / "model.safetensors", metadata)
    for i, what in enumerate(("a value overflows", "a value overflows", "an element is infinite")):
        with pytest.raises(Refused, match=f"m.w.weight': {what}"):
            dict(load(tmp_path / f"{i}"))
        assert what in str(inspect(tmp_path / f"{i}").faults)
    scales[3, 1] = 245  # 2^118 · 448 < 2^127: the largest that are finite are taken
    folder_of(tmp_path / "3", {"m.w.weight": MX8.codes, "m.w.weight_scale": scales})
    assert load(tmp_path / "3")["m.w.weight"].dequantize(torch.float32).isfinite().all()


EMPTY = {
    "inkling": {"m.experts.w13_weight": torch.empty(1, 2**20, 0, dtype=U8),
                "m.experts.w13_weight.scale": torch.empty(1, 2**20, 0).to(torch.float8_e4m3fn),
                "m.experts.w13_weight.scale2": torch.ones(1)},
    "no experts": {"m.experts.w13_weight": torch.empty(0, 64, 32, dtype=U8),
                   "m.experts.w13_weight.scale": torch.empty(0, 64, 4).to(torch.float8_e4m3fn),
                   "m.experts.w13_weight.scale2": torch.ones(1)},
    "modelopt": {"m.w.weight": torch.empty(64, 0, dtype=U8), "m.w.weight_scale_2": torch.ones(()),
                 "m.w.weight_scale": torch.empty(64, 0).to(torch.float8_e4m3fn)},
    "gpt-oss": {"m.experts.down_proj_blocks": torch.empty(2**20, 0, 2, 16, dtype=U8),
                "m.experts.down_proj_scales": torch.empty(2**20, 0, 2, dtype=U8)},
}  # fmt: skip


@pytest.mark.parametrize("layout", EMPTY)
def test_lengths_behind_a_zero_are_not_believed(layout, tmp_path):
    with pytest.raises(Refused, match="accepted: a quantized weight that is not empty"):
        load(folder_of(tmp_path, EMPTY[layout]))


def test_an_empty_quantized_weight_is_not_written(tmp_path):
    with pytest.raises(Refused, match="a quantized weight that is not empty"):
        save({"a": quantize(torch.ones(0, 64), "nvfp4")}, tmp_path / "out", "fp4ext")


# KV caches

CACHES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
}


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt", "fp4ext", "inkling2"])
@pytest.mark.parametrize("source", CACHES)
def test_kv_cache_scales_and_schemes_survive(source, to, tmp_path):
    q = quantize(weight(64, 64), SWEEP)
    scales = {name: torch.tensor(0.25) for name in CACHES[source]}
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    if source == "modelopt":
        about = {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": "FP8"}
        folder_of(tmp_path / "in", modelopt(q, "0") | scales, {}, hf_quant_config={"quantization": about})
    else:
        about = {"quant_method": source, "kv_cache_scheme": scheme}
        folder_of(tmp_path / "in", ct(q, "0") | scales, {"quantization_config": about})
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", to)
    folder = load(tmp_path / "out").folder
    assert all(torch.equal(folder.read(name), t) for name, t in scales.items())
    if to == "inkling2":
        assert "kv_cache_scheme" in report.lost
        return
    assert "kv_cache_scheme" not in report.lost
    said = folder.config["quantization_config"]
    assert said["kv_cache_scheme"] == scheme
    assert to != "modelopt" or folder.quant_config["quantization"]["kv_cache_quant_algo"] == "FP8"
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    with pytest.warns(UserWarning, match="k_scale.* and 1 more"):
        load(tmp_path / "out", model)
    convert_checkpoint(tmp_path / "out", tmp_path / "back", source)
    assert load(tmp_path / "back").folder.config["quantization_config"]["kv_cache_scheme"] == scheme


# Input scales


def test_a_missing_input_scale_is_a_fault_and_the_others_are_kept(tmp_path):
    one = modelopt(quantize(weight(64, 64), SWEEP), "m.a", input_scale=torch.tensor(1 / 256))
    two = modelopt(quantize(weight(64, 64), SWEEP), "m.b")
    folder_of(tmp_path / "in", one | two, {}, hf_quant_config={"quantization": {"quant_algo": "NVFP4"}})
    assert "'m.b.weight' has no input scale, 1 others have one" in inspect(tmp_path / "in").faults[0]
    convert_checkpoint(tmp_path / "in", tmp_path / "ct", "compressed-tensors")
    groups = json.loads((tmp_path / "ct/config.json").read_text())["quantization_config"]["config_groups"]
    said = {t: g["input_activations"] is not None for g in groups.values() for t in g["targets"]}
    assert said == {"m.a": True, "m.b": False}
    convert_checkpoint(tmp_path / "ct", tmp_path / "mo", "modelopt")
    about = json.loads((tmp_path / "mo/hf_quant_config.json").read_text())["quantization"]
    assert {n: a["quant_algo"] for n, a in about["quantized_layers"].items()} == {"m.a": "NVFP4", "m.b": "W4A16_NVFP4"}
    for folder in ("ct", "mo"):
        amax = [load(tmp_path / folder).weight(f"m.{x}.weight").input_amax for x in "ab"]
        assert amax[0].item() == 10.5 and amax[1] is None


def expert_files(tmp_path, maxima, layout="modelopt", outer=SWEEP):
    x = {}
    for e, most in enumerate(maxima):
        for i, part in enumerate(("gate_proj", "up_proj", "down_proj")):
            q = quantize(weight(64, 64, seed=3 * e + i), outer)
            x[f"m.experts.{e}.{part}.weight"] = Stored.of(q, None if most is None else torch.tensor(float(most)))
    return save(x, tmp_path, layout)


@pytest.mark.parametrize("to", ["inkling", "inkling2", "fp4ext"])
def test_a_stack_takes_the_largest_input(to, tmp_path):
    expert_files(tmp_path / "in", (1, 100, 10), outer=Spec("nvfp4", "amax", outer="pow2"))
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", to, requantize=True)
    there = load(tmp_path / "out")
    if to == "inkling":
        assert all(there.weight(n).input_amax.item() == 100 for n in there)
    elif to == "fp4ext":
        assert [there.weight(f"m.experts.{e}.up_proj.weight").input_amax.item() for e in range(3)] == [1, 100, 10]
        assert not report.lost
    else:
        assert all("the input scale has no place in the layout" in report.lost[n] for n in there)


def test_what_bf16_does_to_an_input_maximum_is_said(tmp_path):
    expert_files(tmp_path / "in", (1.001, 1.001), outer=Spec("nvfp4", "amax", outer="pow2"))
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", "inkling", requantize=True)
    assert "input_amax is rounded to BF16" in str(report.lost)


def test_a_divisor_without_a_multiplier_is_said_by_fp4ext_too(tmp_path):
    q = quantize(weight(64, 64), SWEEP)
    folder_of(tmp_path / "in", ct(q, weight_global_scale=torch.tensor([3584.0])))
    assert (
        "global_scale is rounded" in convert_checkpoint(tmp_path / "in", tmp_path / "out", "fp4ext").lost["m.w.weight"]
    )
    folder_of(tmp_path / "in2", ct(q, weight_global_scale=torch.tensor([4096.0])))
    assert not convert_checkpoint(tmp_path / "in2", tmp_path / "out2", "fp4ext").lost


# Gate and up, and stacks


@pytest.mark.parametrize("to", ["inkling", "inkling2"])
def test_requantize_leads_out_of_two_outer_scales(to, tmp_path):
    expert_files(tmp_path / "in", (None, None), outer=Spec("nvfp4", "amax", outer="tensor"))
    with pytest.raises(Refused, match="outer scales that differ.*or requantize"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to)
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", to, requantize=True)
    there = load(tmp_path / "out")["m.experts.w13_weight"].dequantize(torch.float32)
    gate = load(tmp_path / "in")["m.experts.1.gate_proj.weight"].dequantize(torch.float32)
    assert ((there[1, 0::2] - gate).norm() / gate.norm()) < 0.15 and "quantized anew" in str(report.lost)


def test_requantize_leads_out_of_two_formats(tmp_path):
    x = {f"m.experts.{e}.down_proj.weight": quantize(weight(64, 64, seed=e), ("nvfp4", "mxfp8")[e]) for e in range(2)}
    save(x, tmp_path / "in", "modelopt")
    with pytest.raises(Refused):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", "inkling2")
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", "inkling2", requantize=True)
    there = load(tmp_path / "out")["m.experts.w2_weight"]
    assert there.shape == (2, 64, 64) and report.lost
    for e in range(2):
        was = load(tmp_path / "in")[f"m.experts.{e}.down_proj.weight"].dequantize(torch.float32)
        assert (there.dequantize(torch.float32)[e] - was).norm() / was.norm() < 0.15


def test_a_stack_that_is_a_modules_weight(tmp_path):
    """[E, N, K] under `.weight`: modelopt writes it as it reads it; compressed-tensors has no such thing."""
    q = quantize(weight(3, 64, 64), "nvfp4", outer="expert")
    pieces = {"m.fused.weight": q.codes, "m.fused.weight_scale": q.scales, "m.fused.weight_scale_2": q.global_scale}
    folder_of(tmp_path / "in", {n: t.flatten() if n.endswith("_2") else t for n, t in pieces.items()})
    same(load(tmp_path / "in")["m.fused.weight"], q)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", "modelopt")
    same(load(tmp_path / "out")["m.fused.weight"], q)
    with pytest.raises(Refused, match="m.fused.weight.*accepted in compressed-tensors: matrices"):
        convert_checkpoint(tmp_path / "in", tmp_path / "ct", "compressed-tensors")
    assert not (tmp_path / "ct").exists()


# --exclude


@pytest.mark.parametrize("pattern, left", [("*.0.up_proj", 1), ("*.0.up_proj.weight", 1), (r"re:.*\.[01]\.up_proj$", 2),
                                           ("l.1*", 2), ("lm_head", 0)])  # fmt: skip
def test_patterns_match_weights_and_modules(pattern, left, tmp_path, capsys):
    x = {f"l.{i}.{part}.weight": weight(64, 64) for i in range(2) for part in ("up_proj", "down_proj")}
    folder_of(tmp_path / "in", x | {"lm_head.weight": weight(64, 64)})
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out"), "--exclude", pattern]) == 0
    assert sum(load(tmp_path / "out").format(n) is None for n in x) == left


@pytest.mark.parametrize("option", ["--exclude", "--include"])
@pytest.mark.parametrize("pattern", ["l.9.*", "re:^up_proj$", "re:(", "up_proj"])
def test_a_pattern_that_matches_nothing_is_refused(option, pattern, tmp_path, capsys):
    folder_of(tmp_path / "in", {"l.0.up_proj.weight": weight(64, 64), "l.1.up_proj.weight": weight(64, 64)})
    with pytest.raises(SystemExit) as stop:
        main(["export", str(tmp_path / "in"), str(tmp_path / "out"), option, "l.0*", pattern])
    assert stop.value.code == 2 and pattern in capsys.readouterr().err and not (tmp_path / "out").exists()
