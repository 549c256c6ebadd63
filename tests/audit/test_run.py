"""A run directory that `pretrain` left, dense and a mixture, with three faults planted: the audit names them, and none
elsewhere."""

import json

import pytest

import fp4ext
from fp4ext import Recipe, policies
from fp4ext.cli import main
from fp4ext.policy import policy_file
from fp4ext.train import Config, pretrain
from fp4ext.train.load import load
from fp4ext.train.models import products
from fp4ext.train.runs import checkpoint

from .conftest import MIXTURE, PRESET
from .test_experts import drown
from .test_faults import drowned_weight, named, planted

SCHEDULE = dict(eval_every=30, save_every=30, log_every=10, eval_windows=4, final_windows=4)
KINDS = {
    # preset, where dgrad is biased, where a scale saturates, what underflows: module and layer
    "dense": (PRESET, "blocks.0.mlp.down", "blocks.0.mlp.gate_up", ["blocks.1.attention.qkv"]),
    "mixture": (MIXTURE, "blocks.0.mlp.experts", "blocks.1.mlp.shared.down", ["blocks.1.mlp.experts.gate_up_proj"]),
}


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
    """(run directory, kind): a sound run of bf16, end_to_end and the policy with faults; then a layer of it drowned."""
    import argparse

    preset, biased, saturating, _ = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "planted.json").write_text(policy_file.dumps(planted(biased, saturating), form="json"))
    arms = ["bf16", "end_to_end", str(folder / "planted.json")]
    config = Config(preset.with_(steps=30, **SCHEDULE), policies=arms, data=[argparse.__file__], threads=1)
    with pytest.MonkeyPatch.context() as patch:  # the same run on a CPU with BF16 instructions as on one without
        patch.setattr(products, "native", lambda device: False)
        pretrain(config, folder / "run", tensorboard=False)
    return folder / "run", request.param


def audited(folder, out, *policies):
    args = ["audit", str(folder), "--machine", "gb300", "--draws", "12", "--tokens", "128", "--out", str(out)]
    assert main([*args, "--policies", ",".join(policies)] if policies else args) == 0
    return json.loads((out / "report.json").read_text())


@pytest.mark.slow
def test_planted_faults_of_a_run(run, tmp_path, capsys):
    folder, kind = run
    preset, biased, saturating, drowned = KINDS[kind]
    sound = load(folder)
    report = fp4ext.audit.measure(sound.model, sound.batches, ["end_to_end"], draws=12, tokens=256)
    assert named(report) == set()

    manifest, files = checkpoint.load(folder / "checkpoints")
    model = sound.model
    if kind == "dense":
        drowned_weight(model, 1)
    else:
        drown(model.blocks[1].mlp.experts, expert=2)
    files["bf16.weights"] = model.state_dict()
    facts = {key: value for key, value in manifest.items() if key not in ("step", "files")}
    checkpoint.save(folder / "checkpoints", manifest["step"] + 1, files.items(), facts)

    found = audited(folder, tmp_path / "audit")  # of the run's own policies
    faults = [f for f in found["faults"] if f["policy"] == "planted"]
    places = {(f["module"], f["gemm"], f["what"], f["kind"]) for f in faults}
    within = lambda module: {p for p in places if p[0].startswith(module)}  # noqa: E731
    stacks = ("gate_up_proj", "down_proj") if kind == "mixture" else ("",)
    drift = {(".".join(filter(None, (biased, s))), "dgrad", w, "drift") for s in stacks for w in ("dy", "dx")}
    assert within(biased) == drift
    assert within(saturating) == {(saturating, "fprop", "x", "saturation")}
    underflow = {p for p in places if p[0] in drowned}
    assert (
        underflow and {p[3] for p in underflow} == {"underflow"} and (drowned[0], "fprop", "w", "underflow") in places
    )
    assert places == drift | within(saturating) | underflow
    assert "planted" in capsys.readouterr().out and found["facts"]["weights"].startswith("of the arm bf16")

    advice = policy_file.load(tmp_path / "audit" / "advice.json")
    assert advice.pretrain == policies.get("end_to_end").pretrain
    assert advice.rules == ((drowned[0].removesuffix(".gate_up_proj"), Recipe()),)
    why = json.loads((tmp_path / "audit" / "advice.json").read_text())["why"]["rules.0"]
    assert why.startswith("this layer stays in BF16: under sweep")
    assert why.endswith("of the blocks of fprop w underflow")
    assert (tmp_path / "audit" / "report.html").stat().st_size > 10_000
