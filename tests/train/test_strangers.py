"""A run's directory is data: whatever file its configuration names, reading it or going on with it runs none."""

import json
import shutil
from contextlib import suppress

import pytest
import safetensors.torch
import torch

from fp4ext import cli
from fp4ext.train import Config, Preset, Refused, Shape, end_to_end, exported, pretrain, resume, rl
from fp4ext.train import load as run_load
from fp4ext.train.runs import checkpoint

from .conftest import InterruptAt

TASK = """
class Digit:
    most, stop = 2, "\\n"

    def prompt(self, rng):
        return f"{rng.integers(0, 10)}>"

    def reward(self, prompt, completion):
        return float(completion[:1] == prompt[:1])

    def text(self, rng):
        return "".join(f"{d}>{d}\\n" for d in rng.integers(0, 10, 2000))
"""
TRAP = "\nimport pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()\n"
SIZES = dict(warmup=1, save_every=1, eval_every=2, eval_windows=4, final_windows=4)
PRESET = Preset("stranger", Shape(1, 32, 1, 32, 16), steps=2, batch=2, lr=1e-3, min_lr=1e-3, **SIZES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The runs of somebody else, each on a task of a file, and stopped halfway; and that file."""
    folder = tmp_path_factory.mktemp("stranger")
    path = folder / "digit_task.py"
    path.write_text(TASK)
    pretraining = Config(PRESET, policies=["bf16", "end_to_end"], data=[f"task:{path}"], threads=1)
    pretrain(pretraining, folder / "finished", tensorboard=False)
    pretrain(pretraining, folder / "stopped", show=InterruptAt(1), tensorboard=False)
    small = dict(task=str(path), steps=2, prompts=2, group=2, threads=1, eval_prompts=2, slots=4, save_every=1)
    config = rl.Config(source=str(folder / "finished"), arms=["matched"], **small)
    rl.reinforce(config, folder / "rl", show=InterruptAt(1), tensorboard=False)
    return folder, path


@pytest.fixture
def stranger(made, tmp_path):
    """Copies of the runs; the task's file leaves a mark when it is run."""
    folder, path = made
    for name in ("finished", "stopped", "rl"):
        shutil.copytree(folder / name, tmp_path / name)
    path.write_text(TASK + TRAP)
    yield tmp_path
    path.write_text(TASK)
    mark = path.with_suffix(".ran")
    ran = mark.exists()
    mark.unlink(missing_ok=True)
    assert not ran, "the task's file was run"


def refused(capsys, *argv) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in argv])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("run", ["finished", "rl"])
def test_export_needs_no_task(stranger, capsys, run):
    assert cli.main(["export", str(stranger / run), str(stranger / "out"), "--layout", "fp4ext"]) == 0
    assert (stranger / "out" / "model.safetensors").exists()
    exported.of_run(stranger / run)


def test_cost_needs_no_task(stranger):
    assert cli.main(["cost", "--model", str(stranger / "finished")]) == 0


def test_what_needs_the_task_asks_for_it(stranger, made, capsys):
    path = made[1]
    out = ["--out", stranger / "new"]
    assert f"accepted: --task {path}" in refused(capsys, "audit", stranger / "finished", *out)
    assert f"accepted: --task {path}" in refused(capsys, "rl", "--from", stranger / "finished", *out)
    assert f"accepted: --task {path}" in refused(capsys, "rl", "--resume", stranger / "rl")
    assert f"accepted: --data task:{path}" in refused(capsys, "pretrain", "--resume", stranger / "stopped")
    assert not (stranger / "new").exists()
    for call in (
        lambda: run_load.load(stranger / "finished"),
        lambda: resume(stranger / "stopped"),
        lambda: resume(stranger / "stopped", asked={"steps": 2}),
        lambda: rl.resume(stranger / "rl"),
        lambda: rl.reinforce(rl.Config(source=str(stranger / "finished")), stranger / "new"),
    ):
        with pytest.raises(Refused, match="is not run"):
            call()


def test_a_task_that_the_user_names_is_the_one_that_runs(made, stranger, capsys):
    """Another file than the run began with is refused, as a changed one is."""
    other = stranger / "other_task.py"
    other.write_text(TASK.replace("2000", "2001"))
    assert "has changed" in refused(capsys, "rl", "--resume", stranger / "rl", "--task", other)
    assert "text has changed" in refused(
        capsys, "pretrain", "--resume", stranger / "stopped", "--data", f"task:{other}"
    )
    assert "--steps beside --resume; accepted: --resume alone" in refused(
        capsys, "rl", "--resume", stranger / "rl", "--task", other, "--steps", 3
    )


def test_the_user_who_names_it_goes_on(made, tmp_path, capsys):
    folder, path = made
    for name in ("stopped", "rl"):
        shutil.copytree(folder / name, tmp_path / name)
    assert cli.main(["pretrain", "--resume", str(tmp_path / "stopped"), "--data", f"task:{path}"]) == 0
    whole, parts = (checkpoint.load(f / "checkpoints")[1] for f in (folder / "finished", tmp_path / "stopped"))
    assert torch.equal(whole["bf16.weights"]["lm_head.weight"], parts["bf16.weights"]["lm_head.weight"])
    assert cli.main(["rl", "--resume", str(tmp_path / "rl"), "--task", str(path)]) == 0


@pytest.mark.parametrize("stage", ["pretrain", "rl"])
def test_the_stages_of_a_run_name_no_code_either(tmp_path, stage):
    """An end-to-end run on arithmetic, in whose folder a stage's configuration names a file."""
    trap = tmp_path / "trap.py"
    trap.write_text(TASK + TRAP)
    preset = PRESET.with_(shape=Shape(1, 32, 1, 32, 32))
    config = end_to_end.Config(
        preset, policies=["end_to_end"], arms=["matched"], rl_steps=1, prompts=2, group=2, threads=1
    )
    out = tmp_path / "whole"
    assert end_to_end.end_to_end(config, out, tensorboard=False).finished
    there = json.loads((out / stage / "config.json").read_text())
    if stage == "pretrain":
        there["data"]["paths"] = [f"task:{trap}"]
    else:
        there["run"]["task"] = str(trap)
    (out / stage / "config.json").write_text(json.dumps(there))
    (out / stage / "result.json").unlink()
    shutil.rmtree(out / "checkpoint")
    with suppress(Refused):
        end_to_end.resume(out, tensorboard=False)
    assert not trap.with_suffix(".ran").exists()


def test_code_beside_a_model_of_transformers_is_neither_run_nor_offered(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", minversion="5.24")
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    maps = {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": maps}))
    (tmp_path / "theirs.py").write_text("class C: pass\nclass M: pass\n" + TRAP)
    monkeypatch.setattr("builtins.input", lambda *said: pytest.fail("the user was asked to run it"))
    assert "transformers cannot load it" in refused(capsys, "audit", tmp_path, "--out", tmp_path / "out")
    assert not list(tmp_path.rglob("*.ran"))
