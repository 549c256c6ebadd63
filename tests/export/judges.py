"""Who reads and writes what: every pair of a layout and another's tool that runs on a CPU, as a check.

`case` adds one to CASES. test_judges.py runs them; benchmarks/interchange.py runs them too, and writes what was seen
into docs/interchange.md.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import fp4ext
from fp4ext import Fprop, Policy, Recipe, Spec, formats
from fp4ext.export import load, save
from fp4ext.testing import assert_bytes_equal
from fp4ext.train.models.inkling2 import reading

from . import models

WRITES, READS = "fp4ext writes", "fp4ext reads"


@dataclass(frozen=True)
class Case:
    layout: str
    formats: str
    judge: str
    direction: str
    seen: str
    check: Callable[[Path], None]

    def __str__(self):
        return f"{self.layout}-{self.formats}-{self.judge}-{self.direction}".replace(" ", "_")


CASES: list[Case] = []
BIT_EQUAL = "weights bit-equal, logits equal"
EQUAL = "weights equal (its table has no −0)"


def case(layout: str, stored: str, judge: str, direction: str, seen: str):
    """Add a check: what is `seen` when it passes."""

    def add(check):
        CASES.append(Case(layout, stored, judge, direction, seen, check))
        return check

    return add


def judge_version(judge: str) -> str:
    """ "transformers 5.24.0", or the words themselves where the judge is no package."""
    package = judge.split(" ")[0]
    try:
        return judge.replace(package, f"{package} {version(package)}", 1)
    except Exception:  # noqa: BLE001  (no package of that name)
        return judge


def mixed(first: str = "nvfp4/sweep/nearest/1x16/pow2", last: str = "mxfp8", pattern: str = "*layers.5.*") -> Policy:
    """A policy with another format in the layers of a pattern."""
    both = lambda key: Recipe(Fprop(Spec.parse(key), Spec.parse(key)))  # noqa: E731
    return Policy("mixed", both(first), rules=((pattern, both(last)),))


def same(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], zeros: bool = True) -> None:
    """Bit-equal, weight by weight; the sign of zeros counts unless told."""
    assert ours
    for name, w in ours.items():
        a, b = (theirs[name], w) if zeros else (theirs[name] + 0.0, w + 0.0)
        assert_bytes_equal(a.contiguous(), b.contiguous(), name)


def close(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    """Equal but for the last bf16 bit of one element in 1,000.

    A foreign outer scale g is no power of two: they compute e·fl(s/g) or e·fl(s·m), fp4ext e·fl(s·fl(1/g)), all within
    2^-22 of each other in fp32; a bf16 rounding tells them apart with probability about 2^-14.
    """
    assert ours
    for name, w in ours.items():
        a, b = theirs[name].float(), w.float()
        assert a.shape == b.shape, name
        assert bool(((a - b).abs() <= 2**-7 * b.abs()).all()), name
        assert (a != b).float().mean() <= 1e-3, name


# compressed-tensors --------------------------------------------------------------------------------------------------

CT = "compressed-tensors"


def ct_decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """Each module's weight as compressed-tensors' own compressors decode the file's tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    checkpoint = load(folder)
    about = dict(checkpoint.config["quantization_config"])
    config = QuantizationConfig.model_validate(about)
    scheme_of = {}
    for scheme in config.config_groups.values():
        scheme_of |= {target: scheme for target in scheme.targets}
    out = {}
    for name in checkpoint:
        if checkpoint.format(name) is None:
            continue
        scheme = scheme_of.get(name.removesuffix(".weight")) or scheme_of["Linear"]
        state = {t.rpartition(".")[2]: checkpoint.folder.read(t) for t in checkpoint.group(name).values()}
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        out[name] = compressor.decompress(state, scheme)["weight"].to(torch.bfloat16)
    return out


def quantized_only(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = load(folder)
    return {name: checkpoint[name].dequantize(torch.bfloat16) for name in checkpoint if checkpoint.format(name)}


CT_POLICIES = {"nvfp4": "end_to_end", "mxfp4": "mxfp4", "mxfp8": "mxfp8"}


def _ct_cases(fmt: str, policy: str):
    @case(CT, fmt, "compressed-tensors", WRITES, "weights bit-equal")
    def by_compressor(tmp: Path):
        save(models.plain("llama", tmp / "plain"), tmp / "out", CT, policy=policy)
        same(ct_decompressed(tmp / "out"), quantized_only(tmp / "out"))

    @case(CT, fmt, "transformers", WRITES, BIT_EQUAL)
    def by_transformers(tmp: Path):
        save(models.plain("llama", tmp / "plain"), tmp / "out", CT, policy=policy)
        twin = models.opened(models.plain_twin(tmp / "out", tmp / "plain", tmp / "twin"))
        kept = models.opened(tmp / "out")
        assert_bytes_equal(models.logits(kept), models.logits(twin), "logits, decompressed at the first forward")
        same(kept.state_dict(), models.dense(load(tmp / "out")))
        from transformers import CompressedTensorsConfig

        at_once = models.opened(tmp / "out", quantization_config=CompressedTensorsConfig(dequantize=True))
        assert_bytes_equal(models.logits(at_once), models.logits(twin), "logits, dequantized while loading")
        same(at_once.state_dict(), models.dense(load(tmp / "out")))

    seen = "codes, scales byte-equal; weights equal but for bf16 ties" if fmt == "nvfp4" else "weights bit-equal"

    @case(CT, fmt, "compressed-tensors", READS, seen)
    def from_compressor(tmp: Path):
        ct_written(tmp / "theirs", {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16", "mxfp8": "MXFP8A16"}[fmt])
        theirs, ours = ct_decompressed(tmp / "theirs"), quantized_only(tmp / "theirs")
        assert len(ours) == 14
        (close if fmt == "nvfp4" else same)(theirs, ours)
        checkpoint = load(tmp / "theirs")
        for name in ours:
            q, group = checkpoint[name], checkpoint.group(name)
            raw = {role: checkpoint.folder.read(t) for role, t in group.items()}
            codes = raw.get("packed", raw.get("plain"))
            assert_bytes_equal(q.codes, codes.view(q.codes.dtype), name)
            assert_bytes_equal(q.scales, raw["scale"].view(q.scales.dtype), name)


@case(CT, "nvfp4, inputs too", "compressed-tensors", READS, "weights equal but for bf16 ties; input scales")
def ct_inputs(tmp: Path):
    checkpoint = load(ct_written(tmp / "theirs", "NVFP4"))
    close(ct_decompressed(tmp / "theirs"), quantized_only(tmp / "theirs"))
    amaxes = [checkpoint.weight(name).input_amax for name in checkpoint if checkpoint.format(name)]
    assert len(amaxes) == 14 and all(amax.item() == 2688 / 672 for amax in amaxes)


for _fmt, _policy in CT_POLICIES.items():
    _ct_cases(_fmt, _policy)


def ct_written(folder: Path, preset: str) -> Path:
    """A tiny Llama quantized, compressed and saved by compressed-tensors and transformers."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = models.opened(models.plain("llama", folder.with_name("ct-plain")))
    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        args = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if args is None:
            continue
        w, g = module.weight, None
        if args.group_size == 16:
            g = generate_gparam(w.min(), w.max())
            module.weight_global_scale.data = g.reshape(module.weight_global_scale.shape)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.fill_(672.0)
        blocks = w.reshape(w.shape[0], -1, args.group_size)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=g)
        module.weight_scale.data = scale.to(module.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


@case(CT, "nvfp4 + mxfp8", "transformers", WRITES, BIT_EQUAL)
def ct_mixed(tmp: Path):
    save(models.plain("llama", tmp / "plain"), tmp / "out", CT, policy=mixed(pattern="*layers.1.*"))
    assert {load(tmp / "out").format(n).name for n in quantized_only(tmp / "out")} == {"nvfp4", "mxfp8"}
    kept = models.opened(tmp / "out")
    twin = models.opened(models.plain_twin(tmp / "out", tmp / "plain", tmp / "twin"))
    assert_bytes_equal(models.logits(kept), models.logits(twin), "logits")
    same(kept.state_dict(), models.dense(load(tmp / "out")))


@case(CT, "nvfp4", "llm-dequant", WRITES, "weights bit-equal")
def ct_llm_dequant(tmp: Path):
    from llm_dequant.model import convert

    save(models.plain("llama", tmp / "plain"), tmp / "out", CT)
    convert(tmp / "out", tmp / "dense")
    theirs = load(tmp / "dense")
    same({name: theirs[name] for name in theirs}, models.dense(load(tmp / "out")))


# modelopt ------------------------------------------------------------------------------------------------------------


def modelopt():
    """The package, quiet."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.quantization import qtensor
    return qtensor


def modelopt_decoded(folder: Path) -> dict[str, torch.Tensor]:
    """Each weight as modelopt's tensors decode the file's pieces."""
    qtensor, checkpoint, out = modelopt(), load(folder), {}
    for name in checkpoint:
        fmt = checkpoint.format(name)
        if fmt is None:
            continue
        raw = {role: checkpoint.folder.read(t) for role, t in checkpoint.group(name).items()}
        shape = torch.Size(checkpoint.shape(name))
        if fmt.name == "nvfp4":
            t = qtensor.NVFP4QTensor(shape, torch.bfloat16, raw["plain"])
            out[name] = t.dequantize(scale=raw["scale"], double_scale=raw["scale_2"], block_sizes={-1: 16})
        else:
            t = qtensor.MXFP8QTensor(shape, torch.bfloat16, raw["plain"])
            out[name] = t.dequantize(scale=raw["scale"], block_sizes={-1: 32})
    return out


@case("modelopt", "nvfp4", "nvidia-modelopt", WRITES, EQUAL)
def modelopt_nvfp4(tmp: Path):
    save(models.plain("llama", tmp / "plain"), tmp / "out", "modelopt")
    same(modelopt_decoded(tmp / "out"), quantized_only(tmp / "out"), zeros=False)


@case("modelopt", "mxfp8", "nvidia-modelopt", WRITES, "weights bit-equal")
def modelopt_mxfp8(tmp: Path):
    save(models.plain("llama", tmp / "plain"), tmp / "out", "modelopt", policy="mxfp8")
    same(modelopt_decoded(tmp / "out"), quantized_only(tmp / "out"))


@case("modelopt", "nvfp4", "nvidia-modelopt", READS, f"{EQUAL}; input scales")
def modelopt_written(tmp: Path):
    modelopt()
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = models.opened(models.plain("llama", tmp / "plain"))
    model.config.architectures = ["LlamaForCausalLM"]
    model = mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, forward_loop=models.logits)
    export_hf_checkpoint(model, export_dir=tmp / "theirs")
    ours = quantized_only(tmp / "theirs")
    assert len(ours) == 14 and not fp4ext.export.inspect(tmp / "theirs").faults
    same(modelopt_decoded(tmp / "theirs"), ours, zeros=False)
    checkpoint = load(tmp / "theirs")
    for name in ours:
        said = checkpoint.folder.read(name.replace("weight", "input_scale"))
        assert torch.equal(checkpoint.weight(name).input_amax, said * 2688)


@case("modelopt", "mxfp8", "nvidia-modelopt (its MXFP8 bytes, in the layout)", READS, "weights bit-equal")
def modelopt_mxfp8_bytes(tmp: Path):
    t, scale, decoded = _modelopt_mxfp8(7)
    models.folder_of(tmp / "theirs", {"a.weight": t, "a.weight_scale": scale}, hf_quant_config={"producer": {}})
    checkpoint = load(tmp / "theirs")
    assert checkpoint.layout.name == "modelopt"
    assert_bytes_equal(checkpoint["a.weight"].dequantize(torch.bfloat16), decoded)


def _modelopt_mxfp8(seed: int):
    """[64, 96] quantized by modelopt: (codes, scales, what it decodes to)."""
    torch.manual_seed(seed)
    t, scale = modelopt().MXFP8QTensor.quantize(torch.randn(64, 96).bfloat16())
    return t._quantized_data, scale, t.dequantize(torch.bfloat16, scale=scale, block_sizes={-1: 32})


# Experts -------------------------------------------------------------------------------------------------------------


@case("gpt-oss", "mxfp4", "transformers", WRITES, BIT_EQUAL)
def gpt_oss(tmp: Path):
    save(models.plain("gpt_oss", tmp / "plain"), tmp / "out", "gpt-oss")
    from transformers import Mxfp4Config

    theirs = models.opened(tmp / "out", quantization_config=Mxfp4Config(dequantize=True))
    same(theirs.state_dict(), models.dense(load(tmp / "out")))
    twin = models.opened(models.plain_twin(tmp / "out", tmp / "plain", tmp / "twin"))
    assert_bytes_equal(models.logits(theirs), models.logits(twin), "logits")


@case("gpt-oss", "mxfp4", "torchao (its MXFP4 bytes, in the layout)", READS, "weights bit-equal")
def gpt_oss_torchao(tmp: Path):
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    torch.manual_seed(3)
    w = torch.randn(2, 48, 64).bfloat16()
    parts = [MXTensor.to_mx(e, torch.float4_e2m1fn_x2, 32) for e in w]
    blocks = torch.stack([p.qdata.view(torch.uint8) for p in parts]).unflatten(-1, (-1, 16))
    scales = torch.stack([p.scale.view(torch.uint8) for p in parts])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    models.folder_of(tmp / "theirs", {f"{name}_blocks": blocks, f"{name}_scales": scales})
    q = load(tmp / "theirs")[name]
    assert_bytes_equal(q.dequantize(torch.bfloat16), torch.stack([p.dequantize(torch.bfloat16) for p in parts]))


@case("inkling2", "nvfp4 + mxfp8", "transformers (inkling2_loop)", WRITES, f"{BIT_EQUAL}, in bf16 and fp32")
def inkling2_loop(tmp: Path):
    save(models.plain("inkling2_loop", tmp / "plain"), tmp / "out", "inkling2", policy=mixed())
    checkpoint = load(tmp / "out")
    stored = {n: checkpoint.format(n) for n in checkpoint if checkpoint.format(n)}
    assert stored["model.llm.layers.0.mlp.experts.w13_weight"] is formats.NVFP4
    assert stored["model.llm.layers.5.mlp.experts.w2_weight"] is formats.MXFP8
    for dtype in (torch.bfloat16, torch.float32):
        theirs = models.opened(tmp / "out", dtype=dtype)
        twin = models.opened(models.plain_twin(tmp / "out", tmp / "plain", tmp / f"twin-{dtype}", dtype), dtype=dtype)
        same(theirs.state_dict(), twin.state_dict())
        assert_bytes_equal(models.logits(theirs), models.logits(twin), "logits")


def _inkling2(tmp: Path, policy) -> None:
    """transformers' class inkling2 made of what `save` writes: its weights and logits are those fp4ext decodes.

    transformers registers the reader of the release's experts for inkling2_loop alone; of inkling2 it expects MXFP8 and
    leaves it packed, for a GPU. Its public registry gives inkling2 that reader; the twin is loaded by its own.
    """
    save(models.plain("inkling2", tmp / "plain"), tmp / "out", "inkling2", policy=policy)
    config = json.loads((tmp / "out" / "config.json").read_text())
    config.pop("quantization_config", None)
    (tmp / "out" / "config.json").write_text(json.dumps(config))
    twin = models.opened(models.plain_twin(tmp / "out", tmp / "plain", tmp / "twin"))
    with reading():
        theirs = models.opened(tmp / "out")
    assert type(theirs).__name__ == "Inkling2ForCausalLM"
    same(theirs.state_dict(), twin.state_dict())
    assert_bytes_equal(models.logits(theirs), models.logits(twin), "logits")


INKLING2 = "transformers (inkling2, with the loop's reader of experts)"


@case("inkling2", "nvfp4 + mxfp8", INKLING2, WRITES, BIT_EQUAL)
def inkling2(tmp: Path):
    _inkling2(tmp, mixed())
    assert {load(tmp / "out").format(name) for name in load(tmp / "out")} == {None, formats.NVFP4, formats.MXFP8}


@case("inkling2", "mxfp8", INKLING2, WRITES, BIT_EQUAL)
def inkling2_mxfp8_alone(tmp: Path):
    _inkling2(tmp, "mxfp8")


def _modelopt_experts(seed: int):
    """[3, 64, 64] quantized by modelopt, expert by expert: (codes, scales, scale_2 [3], what it decodes to)."""
    qtensor = modelopt()
    torch.manual_seed(seed)
    parts = []
    for w in torch.randn(3, 64, 64):
        t, scale, scale_2 = qtensor.NVFP4QTensor.quantize(w.bfloat16(), 16)
        decoded = t.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
        parts.append((t._quantized_data, scale.view(torch.uint8), scale_2, decoded))
    codes, scales, scale_2, decoded = (torch.stack(list(column)) for column in zip(*parts, strict=True))
    return codes, scales.view(torch.float8_e4m3fn), scale_2, decoded


@case("inkling2", "nvfp4", "nvidia-modelopt (its NVFP4 bytes, in the layout)", READS, "weights equal to 2^-22")
def inkling2_modelopt(tmp: Path):
    codes, scales, scale_2, decoded = _modelopt_experts(4)
    name = "model.llm.layers.0.mlp.experts.w13_weight"
    pieces = {name: codes, f"{name}_scale": scales, f"{name}_amax": scale_2 * 2688}
    models.folder_of(tmp / "theirs", pieces | {f"{name}_outer_scale_denominator": torch.tensor(2688.0)})
    ours = load(tmp / "theirs")[name].dequantize(torch.float32)
    assert bool(((ours - decoded).abs() <= 2**-22 * decoded.abs()).all())


@case("inkling2", "mxfp8", "nvidia-modelopt (its MXFP8 bytes, in the layout)", READS, "weights bit-equal")
def inkling2_mxfp8(tmp: Path):
    parts = [_modelopt_mxfp8(seed) for seed in range(3)]
    codes = torch.stack([p[0].view(torch.uint8) for p in parts]).view(torch.float8_e4m3fn)
    name = "model.llm.layers.20.mlp.experts.w2_weight"
    models.folder_of(tmp / "theirs", {name: codes, f"{name}_scale": torch.stack([p[1] for p in parts])})
    ours = load(tmp / "theirs")[name].dequantize(torch.bfloat16)
    assert_bytes_equal(ours, torch.stack([p[2] for p in parts]))


@case("inkling", "nvfp4", "nvidia-modelopt (its NVFP4 bytes, in the layout)", READS, EQUAL)
def inkling_modelopt(tmp: Path):
    codes, scales, scale_2, decoded = _modelopt_experts(5)
    name = "model.llm.layers.0.mlp.experts.w2_weight"
    shape = torch.tensor([3, 64, 64])
    pieces = {name: codes, f"{name}.scale": scales, f"{name}.scale2": scale_2, f"{name}.original_shape": shape}
    models.folder_of(tmp / "theirs", pieces | {f"{name}.input_amax": torch.ones(1).bfloat16()})
    same({name: decoded}, {name: load(tmp / "theirs")[name].dequantize(torch.float32)}, zeros=False)


@case("inkling", "nvfp4", "nvidia-modelopt (decoding each expert's pieces)", WRITES, EQUAL)
def inkling_out(tmp: Path):
    qtensor = modelopt()
    save(models.plain("inkling2", tmp / "plain"), tmp / "out", "inkling")
    checkpoint = load(tmp / "out")
    names = [n for n in checkpoint if checkpoint.format(n)]
    assert len(names) == 12
    for name in names:
        raw = {role: checkpoint.folder.read(t) for role, t in checkpoint.group(name).items()}
        shape = torch.Size(checkpoint.shape(name))
        assert raw["shape"].tolist() == list(shape)
        for e in range(shape[0]):
            t = qtensor.NVFP4QTensor(shape[1:], torch.bfloat16, raw["plain"][e])
            scale, double = raw["scale"][e].float(), raw["scale2"][e]
            decoded = t.dequantize(scale=scale, double_scale=double, block_sizes={-1: 16})
            same({name: decoded}, {name: checkpoint[name].dequantize(torch.bfloat16)[e]}, zeros=False)


# By the formula alone ------------------------------------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def by_formula(codes: torch.Tensor, scales: np.ndarray, outer: np.ndarray, block: int) -> np.ndarray:
    """element · scale · outer in fp64, from bytes, low nibble first."""
    data = codes.view(torch.uint8).numpy()
    elements = E2M1[np.stack((data & 15, data >> 4), -1).reshape(*data.shape[:-1], -1)]
    return elements * np.repeat(scales, block, -1) * outer


@case("fp4ext", "nvfp4, mxfp4, mxfp8, mxfp8_e5m2", "numpy (the formula, fp64)", WRITES, "weights equal to 2^-22")
def own_layout(tmp: Path):
    from safetensors.numpy import load_file

    torch.manual_seed(6)
    w = torch.randn(48, 96)
    specs = ("nvfp4/sweep/nearest/1x16/row", "nvfp4/amax", "mxfp4", "mxfp8", "mxfp8_e5m2")
    save({f"w{i}": fp4ext.quantize(w, Spec.parse(key)) for i, key in enumerate(specs)}, tmp / "out", "fp4ext")
    checkpoint = load(tmp / "out")
    assert list(checkpoint.config) == ["quantization_config"] and len(checkpoint) == len(specs)
    try:
        raw = load_file(tmp / "out" / "model.safetensors")
    except Exception:  # noqa: BLE001  (numpy has no 8-bit floats: by torch, then)
        from safetensors.torch import load_file as load_torch

        raw = load_torch(tmp / "out" / "model.safetensors")
    for i, key in enumerate(specs):
        q = checkpoint[f"w{i}"]
        scales = torch.as_tensor(raw[f"w{i}.scales"]).view(q.scales.dtype).double().numpy()
        outer = np.asarray(raw[f"w{i}.global_scale"], np.float64) if f"w{i}.global_scale" in raw else np.float64(1)
        if q.format.codes_per_byte == 2:
            wanted = by_formula(torch.as_tensor(raw[f"w{i}.codes"]), scales, outer, q.format.block)
        else:
            codes = torch.as_tensor(raw[f"w{i}.codes"]).view(q.codes.dtype).double().numpy()
            wanted = codes * np.repeat(scales, q.format.block, -1) * outer
        got = q.dequantize(torch.float32).double().numpy()
        assert (np.abs(got - wanted) <= 2**-22 * np.abs(wanted)).all(), key
