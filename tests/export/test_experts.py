"""Experts, in every arrangement, into every layout and back."""

import re

import pytest
import torch
from safetensors.torch import load_file

from fp4ext import Spec, quantize
from fp4ext.export import LAYOUTS, Refused, convert_checkpoint, load, save
from fp4ext.testing import assert_bytes_equal

from .models import folder_of
from .weights import MXFP4, SWEEP, experts, weight

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
    forth = convert_checkpoint(tmp_path / "a", tmp_path / "b", other)
    back = convert_checkpoint(tmp_path / "b", tmp_path / "c", one)
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
    convert_checkpoint(tmp_path / "a", tmp_path / "b", other)
    convert_checkpoint(tmp_path / "b", tmp_path / "c", "gpt-oss")
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
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("one, other", [("inkling2", "modelopt"), ("compressed-tensors", "inkling2")])
def test_mxfp8_experts_there_and_back(one, other, tmp_path):
    source, truth = experts("stacked")
    save(source, tmp_path / "a", one, policy="mxfp8")
    convert_checkpoint(tmp_path / "a", tmp_path / "b", other)
    convert_checkpoint(tmp_path / "b", tmp_path / "c", one)
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
    """amax survives BF16, through which the release's loader takes it. Over its denominator it is the outer scale: bit
    for bit where that is a power of two, else within an ulp, which the report says."""
    for i, spec in enumerate((SWEEP, Spec("nvfp4", "amax", outer="expert"), Spec("nvfp4", "sweep", outer="expert"))):
        x = weight(40, 32, 32, seed=i)
        report = save({"m.experts.w2_weight": x}, tmp_path / f"{i}", "inkling2", policy=spec)
        raw = load_file(tmp_path / f"{i}" / "model.safetensors")
        amax, denominator = (raw[f"m.experts.w2_weight_{part}"] for part in ("amax", "outer_scale_denominator"))
        wanted = torch.stack([quantize(e, spec.with_(outer="tensor") if i else spec).global_scale for e in x])
        assert_bytes_equal(amax, amax.bfloat16().float())
        assert denominator.shape == ()
        if i == 0:
            assert not report.lost
            assert_bytes_equal(amax / denominator, wanted)
        else:
            assert bool(((amax / denominator - wanted).abs() <= 2**-23 * wanted).all())
            assert re.search("the outer scale is off by [1-9]e-0[78]", str(report.lost))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", ["amax", "sweep", "four_over_six"])
@pytest.mark.parametrize("via", [[], ["fp4ext"], ["compressed-tensors"], ["modelopt", "fp4ext"]])
def test_inkling2_is_lossless_to_its_loader_or_says_so(via, rule, seed, tmp_path):
    """What BF16 makes of amax decodes the same BF16 weights, or the report names the weight; by every way there."""
    x = {"m.experts.0.down_proj.weight": weight(64, 64, seed=seed)}
    source, lost = x, {}
    for i, layout in enumerate([*via, "inkling2"]):
        if i == 0:
            report = save(source, tmp_path / "0", layout, policy=Spec("nvfp4", rule, outer="tensor"))
        else:
            report = convert_checkpoint(tmp_path / f"{i - 1}", tmp_path / f"{i}", layout)
        lost |= report.lost
    (name,) = load(tmp_path / f"{i}")
    folder = load(tmp_path / f"{i}").folder
    amax, denominator = folder.read(f"{name}_amax"), folder.read(f"{name}_outer_scale_denominator")
    q = quantize(x["m.experts.0.down_proj.weight"], Spec("nvfp4", rule, outer="tensor"))
    exact = bool((amax.bfloat16().float() / denominator == q.global_scale).all())
    assert exact or lost
    if via in ([], ["fp4ext"]):
        assert exact and not lost  # one scale: there is always a denominator for it


@pytest.mark.parametrize("layout", ["inkling", "inkling2", "fp4ext"])
def test_a_dead_expert(layout, tmp_path):
    x = weight(3, 64, 64)
    x[1] = 0
    save({"m.experts.w2_weight": x}, tmp_path / "out", layout)
    q = load(tmp_path / "out")["m.experts.w2_weight"]
    assert q.global_scale.shape == (3, 1, 1) and (q.global_scale > 0).all()
    assert not q.dequantize(torch.float32)[1].any() and q.dequantize(torch.float32)[2].any()
