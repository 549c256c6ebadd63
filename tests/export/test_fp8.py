"""FP8 weights beside NVFP4 or alone: read, kept byte for byte, described, shown, and used in a loaded model."""

import copy
import json

import pytest
import torch

import fp4ext
from fp4ext.export import Refused, convert_checkpoint, inspect, load, save
from fp4ext.export.fp8 import Fp8
from fp4ext.export.fp8_linear import Fp8Linear
from fp4ext.testing import assert_bytes_equal

from . import models
from .models import folder_of, transformers
from .weights import SWEEP, weight

NV = fp4ext.quantize(weight(96, 64), SWEEP)
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


def nvfp4(name="m.nv"):
    return {f"{name}.weight": NV.codes, f"{name}.weight_scale": NV.scales, f"{name}.weight_scale_2": NV.global_scale}


def codes(*shape, dtype=E4M3, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(40).to(dtype)


def scale(*shape, dtype=torch.float32, seed=1):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) / 64 + 2**-9).to(dtype)


def spread_by_loops(s: torch.Tensor, shape, block) -> torch.Tensor:
    """One scale an element, in plain loops."""
    out = torch.empty(shape)
    rows, columns = block
    for i in range(0, shape[-2], rows):
        for j in range(0, shape[-1], columns):
            value = s[..., i // rows, j // columns] if s.dim() >= 2 else s
            out[..., i : i + rows, j : j + columns] = value[..., None, None] if value.dim() else value
    return out


# scheme → (codes, scale, the suffix, the block by which the loops spread it, kind)
N, K = 200, 300
CASES = {
    "tensor []": (codes(N, K), scale(), "weight_scale", (N, K), "fp8_e4m3/tensor"),
    "tensor [1]": (codes(N, K), scale(1), "weight_scale", (N, K), "fp8_e4m3/tensor"),
    "tensor bf16": (codes(N, K), scale(dtype=torch.bfloat16), "weight_scale_inv", (N, K), "fp8_e4m3/tensor"),
    "e5m2": (codes(N, K, dtype=E5M2), scale(), "weight_scale", (N, K), "fp8_e5m2/tensor"),
    "channel [N]": (codes(N, K), scale(N), "weight_scale", (1, K), "fp8_e4m3/channel"),
    "channel [N, 1]": (codes(N, K), scale(N, 1), "weight_scale", (1, K), "fp8_e4m3/channel"),
    "channel bf16": (codes(N, K), scale(N, 1, dtype=torch.bfloat16), "weight_scale", (1, K), "fp8_e4m3/channel"),
    "block": (codes(N, K), scale(2, 3), "weight_scale_inv", (128, 128), "fp8_e4m3/block128x128"),
    "block as modelopt": (codes(N, K), scale(2, 1, 3, 1), "weight_scale", (128, 128), "fp8_e4m3/block128x128"),
    "block e8m0": (codes(N, K), scale(2, 3).to(E8M0), "scale", (128, 128), "fp8_e4m3/block128x128"),
    "1x128": (codes(N, K), scale(N, 3), "weight_scale_inv", (1, 128), "fp8_e4m3/block1x128"),
}


def case(name, prefix="m.w"):
    c, s, suffix, block, kind = CASES[name]
    matrix = s.squeeze()
    if kind.endswith("channel"):
        matrix = s.reshape(-1, 1)
    elif s.numel() == 1:
        matrix = s.reshape(1, 1)
    truth = c.float() * spread_by_loops(matrix.float(), c.shape, block)
    return {f"{prefix}.weight": c, f"{prefix}.{suffix}": s}, truth, kind


@pytest.mark.parametrize("with_nvfp4", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_read(name, with_nvfp4, tmp_path):
    pieces, truth, kind = case(name)
    checkpoint = load(folder_of(tmp_path, pieces | (nvfp4() if with_nvfp4 else {})))
    w = checkpoint["m.w.weight"]
    assert isinstance(w, Fp8) and w.kind == kind and checkpoint.shape("m.w.weight") == (N, K) == tuple(w.shape)
    for dtype in (torch.float32, torch.bfloat16):
        assert_bytes_equal(w.dequantize(dtype), truth.to(dtype))
    assert checkpoint.nbytes("m.w.weight") == w.nbytes and len(checkpoint) == 1 + with_nvfp4
    found = inspect(tmp_path)
    assert found.layout == ("modelopt" if with_nvfp4 else "plain")
    assert kind in [row.format for row in found.rows] and kind in str(found)


def test_a_block_size_that_the_config_names(tmp_path):
    pieces = {"m.w.weight": codes(N, K), "m.w.weight_scale_inv": scale(4, 5)}
    about = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    w = load(folder_of(tmp_path / "a", pieces, {"quantization_config": about}))["m.w.weight"]
    assert w.block == (64, 64)
    with pytest.raises(Refused, match="m.w.weight_scale_inv.*FP8 codes.*128×128"):
        load(folder_of(tmp_path / "b", pieces))


def test_stacks_of_experts(tmp_path):
    """As transformers saves FP8 experts."""
    c = codes(3, 256, 128)
    for i, s in enumerate((scale(3, 2, 1), scale(3, 1, 1), scale(3), scale(3, 256, 1))):
        name = "m.experts.gate_up_proj"
        w = load(folder_of(tmp_path / f"{i}", {name: c, f"{name}_scale_inv": s}))[name]
        for e in range(3):
            block = (128, 128) if i == 0 else (1, 128) if i == 3 else (256, 128)
            one = s[e] if s[e].dim() == 2 else s[e].reshape(1, 1)
            assert_bytes_equal(w.dequantize(torch.float32)[e], c[e].float() * spread_by_loops(one, (256, 128), block))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors", "fp4ext", "inkling2", "gpt-oss"])
def test_kept_as_they_are(layout, name, tmp_path):
    """Codes, scales and input scales, byte for byte, there and back; the config says what they are, or `lost` does."""
    pieces, truth, kind = case(name)
    pieces |= {"m.w.input_scale": torch.tensor([0.5]), "m.norm.weight": torch.ones(64)}
    folder_of(tmp_path / "in", pieces | (nvfp4() if layout in ("modelopt", "compressed-tensors", "fp4ext") else {}))
    if kind.startswith("fp8_e5m2") and layout == "compressed-tensors":
        with pytest.raises(Refused, match="fp8_e5m2/tensor .*; accepted in compressed-tensors: E4M3"):
            convert_checkpoint(tmp_path / "in", tmp_path / "out", layout)
        return
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", layout)
    assert report.quantized["m.w.weight"] == kind and kind in str(report)
    assert ("m.w.weight" in report.lost) == (layout not in ("modelopt", "compressed-tensors"))
    convert_checkpoint(tmp_path / "out", tmp_path / "back", "modelopt")
    for folder in ("out", "back"):
        there = load(tmp_path / folder)
        w = there["m.w.weight"]
        assert_bytes_equal(w.codes, pieces["m.w.weight"])
        was = next(t for n, t in pieces.items() if "m.w" in n and "scale" in n)
        assert_bytes_equal(w.scale.flatten(), was.flatten())
        assert_bytes_equal(w.input_scale.flatten(), torch.tensor([0.5]))
        assert_bytes_equal(w.dequantize(torch.float32), truth)
        assert set(there) >= {"m.w.weight", "m.norm.weight"} and not inspect(tmp_path / folder).faults


def test_what_the_configs_say(tmp_path):
    pieces = nvfp4()
    for i, name in enumerate(("tensor []", "channel [N]", "block")):
        pieces |= case(name, f"m.{i}")[0]
    folder_of(tmp_path / "in", pieces | {"m.0.input_scale": torch.tensor(0.5)})
    convert_checkpoint(tmp_path / "in", tmp_path / "ct", "compressed-tensors")
    about = json.loads((tmp_path / "ct/config.json").read_text())["quantization_config"]
    said = {t: (g["format"], g["weights"]["strategy"]) for g in about["config_groups"].values() for t in g["targets"]}
    assert said == {
        "m.nv": ("nvfp4-pack-quantized", "tensor_group"),
        "m.0": ("float-quantized", "tensor"),
        "m.1": ("float-quantized", "channel"),
        "m.2": ("float-quantized", "block"),
    }
    assert about["ignore"] == [] and about["format"] == "mixed-precision"
    convert_checkpoint(tmp_path / "ct", tmp_path / "mo", "modelopt")
    quantization = json.loads((tmp_path / "mo/hf_quant_config.json").read_text())["quantization"]
    assert {name: layer["quant_algo"] for name, layer in quantization["quantized_layers"].items()} == {
        "m.nv": "W4A16_NVFP4",
        "m.0": "FP8",
        "m.1": "FP8_PER_CHANNEL_PER_TOKEN",
        "m.2": "FP8_PB_WO",
    }


def test_compressed_tensors_decompresses_what_is_written(tmp_path):
    """Its own compressor, by the config that is written, decodes the same values (bf16: it multiplies there)."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    for i, name in enumerate(("tensor []", "channel [N]", "block")):
        pieces, truth, _ = case(name)
        folder_of(tmp_path / f"in{i}", pieces)
        convert_checkpoint(tmp_path / f"in{i}", tmp_path / f"out{i}", "compressed-tensors")
        about = json.loads((tmp_path / f"out{i}/config.json").read_text())["quantization_config"]
        config = QuantizationConfig.model_validate(about)
        scheme = config.config_groups["group_0"]
        folder = load(tmp_path / f"out{i}").folder
        state = {t.rpartition(".")[2]: folder.read(t) for t in folder.slots}
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        theirs = compressor.decompress(state, scheme)["weight"].float()
        assert theirs.shape == truth.shape
        assert bool(((theirs - truth).abs() <= 2**-8 * truth.abs()).all())


def test_transformers_decodes_blocks_alike():
    transformers()
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    c, s = codes(256, 384), scale(2, 3)
    theirs = _dequantize_fp8_weight(c, s, [128, 128], torch.float32)
    assert_bytes_equal(Fp8(c, s, (128, 128)).dequantize(torch.float32), theirs)


@pytest.mark.parametrize("name", CASES)
def test_in_a_model(name, tmp_path):
    """A linear layer keeps its bytes, multiplies by what they decode to, and is saved as it was."""
    pieces, truth, kind = case(name, "0")
    folder_of(
        tmp_path / "in", pieces | {"0.bias": torch.ones(N)} | {n.replace("m.nv", "1"): t for n, t in nvfp4().items()}
    )
    model = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Linear(64, 96, bias=False))
    load(tmp_path / "in", model)
    assert isinstance(model[0], Fp8Linear) and isinstance(model[1], fp4ext.nn.packed_layers.QuantizedLinear)
    x = torch.randn(5, K)
    for made in (model, copy.deepcopy(model), model.to(torch.bfloat16).float()):
        assert_bytes_equal(made[0](x), torch.nn.functional.linear(x, truth, torch.ones(N)))
    assert model[0].half()(x.half()).dtype == torch.float16 and kind in repr(model)
    report = save(model, tmp_path / "out", "fp4ext")
    assert report.quantized["0.weight"] == kind
    again = load(tmp_path / "out")["0.weight"]
    assert_bytes_equal(again.codes, pieces["0.weight"])
    assert_bytes_equal(again.dequantize(torch.float32), truth)


def test_a_parameter_that_is_no_linear_layers_is_dequantized(tmp_path):
    pieces, truth, _ = case("block", "0")
    folder_of(tmp_path, pieces)
    model = torch.nn.Sequential(torch.nn.Embedding(N, K))
    assert_bytes_equal(load(tmp_path, model)[0].weight.detach(), truth)


BAD = {
    "0.weight_scale' holds a scale that is negative or not finite": {"0.weight_scale": torch.tensor([-1.0])},
    "holds a scale that is negative or not finite;": {"0.weight_scale": torch.tensor([float("nan")])},
    "an element is NaN or infinite": {"0.weight": torch.full((N, K), float("nan")).to(E4M3)},
    "an element is NaN or infinite;": {"0.weight": torch.full((N, K), float("inf")).to(E5M2)},
    "an element times its scale overflows": {"0.weight_scale": torch.tensor([3e38])},
    "is (3,) beside FP8 codes": {"0.weight_scale": torch.ones(3)},
    "0.weight_zero_point' has no meaning beside FP8 codes": {"0.weight_zero_point": torch.zeros(1)},
    "0.weight' is float8_e4m3fn, and no scale of it is there": {"0.weight_scale": None},
    "is (200, 0); accepted: a quantized weight that is not empty": {"0.weight": torch.empty(N, 0).to(E4M3)},
}


@pytest.mark.parametrize("message", BAD)
def test_refused(message, tmp_path):
    pieces = case("tensor [1]", "0")[0] | BAD[message]
    folder_of(tmp_path, {name: t for name, t in pieces.items() if t is not None})
    with pytest.raises(Refused) as error:
        dict(load(tmp_path))
    assert message in str(error.value)


# What modelopt exports


def exported(tmp_path, config: str, fp8_layers: str | None = None, kv_cache: bool = False):
    """A tiny Llama as modelopt quantizes and exports it; some of its layers in FP8, and its KV cache."""
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization import qtensor  # noqa: F401  (first, else the next import fails)

    import modelopt.torch.quantization as mtq  # isort: skip

    model = models.opened(models.plain("llama", tmp_path / "plain"))
    model.config.architectures = ["LlamaForCausalLM"]
    rules = list(getattr(mtq, config)["quant_cfg"])
    if fp8_layers:
        fp8 = {"num_bits": (4, 3), "axis": None}
        rules += [{"quantizer_name": f"{fp8_layers}.*{what}_quantizer", "cfg": fp8} for what in ("weight", "input")]
    rules += list(mtq.FP8_KV_CFG["quant_cfg"]) if kv_cache else []
    model = mtq.quantize(model, {"quant_cfg": rules, "algorithm": "max"}, forward_loop=models.logits)
    export_hf_checkpoint(model, export_dir=tmp_path / "theirs")
    return tmp_path / "theirs"


REAL = {
    "FP8_DEFAULT_CFG": "fp8_e4m3/tensor",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": "fp8_e4m3/channel",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": "fp8_e4m3/tensor",  # one block each, whose scale it writes without a shape
}


@pytest.mark.parametrize("config", REAL)
def test_modelopts_own_exports(config, tmp_path):
    """Every linear layer is read as FP8, within a step of what was quantized, and survives compressed-tensors."""
    theirs = exported(tmp_path, config)
    plain, there = load(tmp_path / "plain"), load(theirs)
    fp8 = [name for name in there if isinstance(there[name], Fp8)]
    assert len(fp8) == 14 and {there[name].kind for name in fp8} == {REAL[config]}
    assert not inspect(theirs).faults
    for name in fp8:
        got, was = there[name].dequantize(torch.float32), plain[name].float()
        assert bool(((got - was).abs() <= 2**-4 * was.abs() + 2**-9 * was.abs().max()).all()), name
    convert_checkpoint(theirs, tmp_path / "out", "compressed-tensors")
    again = load(tmp_path / "out")
    for name in fp8:
        assert_bytes_equal(again[name].codes, there[name].codes)
        assert_bytes_equal(again[name].dequantize(), there[name].dequantize())
        assert (again[name].input_scale is None) == (there[name].input_scale is None)


def test_modelopts_nvfp4_beside_fp8(tmp_path):
    theirs = exported(tmp_path, "NVFP4_DEFAULT_CFG", fp8_layers="*layers.1")
    there = load(theirs)
    kinds = {name.split(".")[2]: type(there[name]).__name__ for name in there if ".mlp." in name and "weight" in name}
    assert kinds == {"0": "QTensor", "1": "Fp8"} and not inspect(theirs).faults
    report = convert_checkpoint(theirs, tmp_path / "out", "compressed-tensors")
    assert sorted(set(report.quantized.values())) == ["fp8_e4m3/tensor", "nvfp4"]
    kept = models.opened(tmp_path / "out")
    assert models.logits(kept).isfinite().all()
    for name in ("model.layers.1.mlp.up_proj", "model.layers.0.mlp.up_proj"):
        models.logits(kept)
        weight = kept.get_submodule(name).weight
        close = (weight.float() - there[f"{name}.weight"].dequantize(torch.float32)).abs()
        assert bool((close <= 2**-7 * weight.float().abs()).all()), name


def test_modelopts_kv_cache(tmp_path):
    theirs = exported(tmp_path, "FP8_DEFAULT_CFG", kv_cache=True)
    there = load(theirs)
    scales = [name for name in there if name.endswith((".k_scale", ".v_scale"))]
    assert len(scales) == 4
    convert_checkpoint(theirs, tmp_path / "out", "compressed-tensors")
    about = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert about["kv_cache_scheme"]["num_bits"] == 8 and set(scales) <= set(load(tmp_path / "out"))
