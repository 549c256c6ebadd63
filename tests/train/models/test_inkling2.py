"""A model of transformers through the main job: converted where it may be, and otherwise left alone."""

import sys

import pytest
import safetensors.torch
import torch
from torch import nn

import fp4ext
from fp4ext import cli
from fp4ext.train import PRESETS, Config, Refused, Shape, load, pretrain, resume
from fp4ext.train.models import inkling2
from fp4ext.train.pretraining.arm import Arm
from fp4ext.train.pretraining.config import command
from fp4ext.train.runs import checkpoint

from ..conftest import MICRO, InterruptAt
from ..test_pretraining import metrics, same_checkpoint

transformers = pytest.importorskip("transformers", minversion="5.24")

SHAPE = Shape(layers=2, d=32, heads=2, ffn=0, context=32, experts=4, top_k=2, expert_ffn=32)
PRESET = MICRO.with_(name="inkling2-micro", model="inkling2", shape=SHAPE)
POLICIES = ("bf16", "end_to_end")


@pytest.fixture
def job(text):
    def make(policies=POLICIES, **changes):
        return Config(PRESET.with_(**changes), policies=policies, data=[text], threads=1)

    return make


def arm(policy):
    return Arm(policy, PRESET, 0, torch.device("cpu"))


def test_learns_and_says_what_it_converts(job, tmp_path):
    notes = InterruptAt(None)
    result = pretrain(job(steps=20, eval_every=20), tmp_path / "run", show=notes, tensorboard=False)
    for row in result.rows:
        assert row.final_loss < 4.5 < 5.4 < row.start_loss and 0 <= row.load_min <= 1 <= row.load_max
    bf16, four = result.rows
    assert (bf16.converted, four.converted) == (0, 14) and (bf16.weight_bits, four.weight_bits) == (16, 4.5)
    said = "end_to_end quantizes of Inkling2ForCausalLM: 12 Linear, 2 Inkling2Experts; leaves: Conv1d, "
    assert [note for note in notes.notes if "quantizes" in note][0].startswith(said)
    page = result.report.read_text()
    assert "Inkling2ForCausalLM of transformers" in page and "Inkling2TopKRouter has no 4-bit form here" in page
    # What knows our transformer alone says so.
    with pytest.raises(Refused, match="a run of inkling2-micro; accepted: one of a model of fp4ext's own"):
        load.load(tmp_path / "run")
    # What was trained loads into transformers' own class.
    plain = inkling2.build(SHAPE, seed=9)
    for policy in POLICIES:
        path = checkpoint.latest(tmp_path / "run" / "checkpoints") / f"{policy}.weights.safetensors"
        plain.load_state_dict(safetensors.torch.load_file(path), strict=True)
        assert type(plain) is transformers.Inkling2ForCausalLM


def test_resume_is_bit_for_bit(job, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(job(steps=6), whole, tensorboard=False)
    pretrain(job(steps=6), parts, show=InterruptAt(3), tensorboard=False)
    state = checkpoint.load(parts / "checkpoints")[1]["end_to_end.weights"]
    assert state["model.layers.1.mlp.gate.e_score_correction_bias"].abs().max() > 0
    resume(parts, tensorboard=False)
    assert metrics(parts) == metrics(whole)
    same_checkpoint(parts, whole)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_left_runs_in_fp32(policy):
    """Experts and projections with BF16 operands; router, norms, convolutions, attention and head not."""
    a = arm(policy)
    seen = {}

    def watch(name):
        def hook(module, given, y):
            seen[name] = module, torch.is_autocast_enabled("cpu"), y

        return hook

    for name, module in a.model.named_modules():
        module.register_forward_hook(watch(name), prepend=True)
    a._logits(torch.randint(0, 256, (2, 16)))
    low = {name for name, (_, autocast, _) in seen.items() if autocast}
    experts = {f"model.layers.{i}.mlp.experts" for i in range(2)}
    assert experts <= low and {n.split(".", 3)[3] for n in low if "self_attn" in n} == {
        *(f"self_attn.{p}.linear" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "relative_position_bias")),
        "self_attn.o_proj.gate_proj",
    }
    for name, (module, autocast, y) in seen.items():
        if not autocast and isinstance(y, torch.Tensor):
            assert y.dtype == torch.float32, name
        if isinstance(module, fp4ext.Linear):
            assert policy != "bf16" and name in low
    assert {type(m).__name__ for m, autocast, _ in seen.values() if not autocast} >= {
        "Inkling2TopKRouter",
        "Inkling2RMSNorm",
        "Inkling2ShortConvolution",
    }


def test_bf16_is_near_the_model_in_fp32():
    """The arm's own arithmetic changes the logits by BF16's rounding of products, 2⁻⁸ each, and no more."""
    x = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, got = inkling2.build(SHAPE, seed=0)(x).logits, arm("bf16")._logits(x)
    assert 0 < (got - wanted).norm() < 2**-6 * wanted.norm()


def test_the_seed_decides():
    torch.manual_seed(5)
    a = inkling2.build(SHAPE, seed=1).state_dict()
    before = torch.get_rng_state()
    b = inkling2.build(SHAPE, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[key], b[key]) for key in a)
    name = "model.layers.0.mlp.experts.down_proj"
    assert not torch.equal(inkling2.build(SHAPE, seed=2).state_dict()[name], a[name])


def test_the_preset():
    """About 3M parameters: hidden 128, 6 layers, 16 experts of which a token meets 2, over bytes."""
    preset = PRESETS["inkling2-tiny"]
    model = inkling2.build(preset.shape, seed=0)
    assert 2.8e6 < sum(p.numel() for p in model.parameters()) < 3.2e6
    c = model.config
    assert (c.hidden_size, c.num_hidden_layers, c.n_routed_experts, c.num_experts_per_tok) == (128, 6, 16, 2)
    assert (c.vocab_size, c.unpadded_vocab_size) == (256, 256) and c.layer_types.count("hybrid") == 1
    report = inkling2.convert(model, fp4ext.policies.get("end_to_end"))
    assert len(report.converted) == 6 * 7
    assert not any(isinstance(m, fp4ext.Linear) for n, m in model.named_modules() if "conv" in n or "gate" in n[-5:-1])
    assert isinstance(model.lm_head, nn.Linear) and not isinstance(model.lm_head, fp4ext.Linear)


def test_the_command_line(capsys, tmp_path):
    assert " --model inkling2-tiny " in command(Config("inkling2-tiny"))
    assert " --preset moe-tiny " in command(Config("moe-tiny"))
    with pytest.raises(SystemExit):
        cli.main(["pretrain", "--model", "inkling2-tiny", "--preset", "tiny", "--out", str(tmp_path)])
    assert "--preset: not allowed with argument --model" in capsys.readouterr().err


def test_refusals(monkeypatch):
    with pytest.raises(Refused, match="an inkling2 has experts, and none that is shared; accepted: experts, and ffn=0"):
        PRESET.with_(shape=MICRO.shape)
    with pytest.raises(Refused, match="model: 'gpt'; accepted: transformer, inkling2"):
        PRESET.with_(model="gpt")
    with monkeypatch.context() as patch, pytest.raises(Refused, match="is 5.9.1; accepted: 5.24 or later"):
        patch.setattr(inkling2, "version", lambda: "5.9.1")
        Config("inkling2-tiny")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Refused, match=r"needs transformers, which is not installed; .* pip install 'fp4ext\[transf"):
        Config("inkling2-tiny")
    assert Config("tiny").preset.name == "tiny"
