"""Training runs: they learn, they repeat, and they go on as if they had never stopped."""

import errno
import json
import signal

import pytest
import safetensors.torch
import torch

from fp4ext.train import Refused, Stopped, pretrain, resume
from fp4ext.train.models.transformer import Transformer
from fp4ext.train.pretraining.arm import Arm, learning_rate, policy_names
from fp4ext.train.runs import checkpoint, digest, disk
from fp4ext.train.runs import directory as rundir

from .conftest import MICRO, InterruptAt

needs_nvidia = pytest.mark.skipif("nvidia" not in policy_names(), reason="this version has no nvidia policy")
POLICIES = [("bf16",), pytest.param(("bf16", "nvidia"), marks=needs_nvidia)]


def metrics(out):
    """metrics.jsonl without the clock."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in rundir.read_metrics(out)]


def same_checkpoint(a, b):
    (left, left_files), (right, right_files) = checkpoint.load(a / "checkpoints"), checkpoint.load(b / "checkpoints")
    assert left["step"] == right["step"] and left_files.keys() == right_files.keys()
    for name, tensors in left_files.items():
        assert tensors.keys() == right_files[name].keys()
        for key, value in tensors.items():
            assert torch.equal(value, right_files[name][key]), f"{name}: {key}"


@pytest.mark.parametrize("policies", POLICIES)
def test_learns(micro, tmp_path, policies):
    result = pretrain(micro(policies, steps=60, eval_every=20), tmp_path / "run", tensorboard=False)
    assert result.finished and [row.policy for row in result.rows] == list(policies)
    for row in result.rows:
        assert row.start_loss == pytest.approx(5.545, abs=0.01) and row.final_loss < 3.6 and row.diverged is None
    assert result.rows[0].gap == 0.0
    assert (
        json.loads((tmp_path / "run" / "result.json").read_bytes())["rows"][0]["final_loss"]
        == result.rows[0].final_loss
    )


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("stops", [(5,), (4, 9), (1,)])
def test_resume_is_bit_for_bit(micro, tmp_path, policies, stops):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    reference = pretrain(micro(policies), whole, tensorboard=False)
    result = pretrain(micro(policies), parts, show=InterruptAt(stops[0]), tensorboard=False)
    for stop, following in zip(stops, [*stops[1:], None], strict=True):
        assert not result.finished and result.step == stop and result.signal == signal.SIGINT
        torch.manual_seed(stop)  # whatever else the process did with the generators
        result = resume(parts, show=InterruptAt(following), tensorboard=False)
    assert result.finished
    assert metrics(parts) == metrics(whole)
    same_checkpoint(parts, whole)
    assert [row.final_loss for row in result.rows] == [row.final_loss for row in reference.rows]


def test_resume_after_a_kill_drops_what_came_after_the_checkpoint(micro, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(micro(), whole, tensorboard=False)

    class Killed(InterruptAt):
        def step(self, done, lines):
            if done == self.at:
                raise SystemError("killed")

    with pytest.raises(SystemError):
        pretrain(micro(), parts, show=Killed(7), tensorboard=False)
    with open(parts / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "poli')
    resume(parts, tensorboard=False)
    assert metrics(parts) == metrics(whole)
    same_checkpoint(parts, whole)


def test_finished_run_resumes_to_the_same_report(micro, tmp_path):
    first = pretrain(micro(), tmp_path / "run", tensorboard=False)
    before = metrics(tmp_path / "run")
    again = resume(tmp_path / "run", tensorboard=False)
    assert again.finished and again.rows == first.rows and metrics(tmp_path / "run") == before


@needs_nvidia
def test_an_arm_does_not_depend_on_its_neighbours(micro, tmp_path):
    pretrain(micro(("nvidia",)), tmp_path / "alone", tensorboard=False)
    pretrain(micro(("mxfp8", "nvidia")), tmp_path / "beside", tensorboard=False)
    assert metrics(tmp_path / "alone") == [line for line in metrics(tmp_path / "beside") if line["policy"] == "nvidia"]


def test_seed_decides(micro, tmp_path):
    pretrain(micro(seed=0), tmp_path / "a", tensorboard=False)
    pretrain(micro(seed=0), tmp_path / "b", tensorboard=False)
    pretrain(micro(seed=1), tmp_path / "c", tensorboard=False)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b") != metrics(tmp_path / "c")


@pytest.mark.parametrize("policies", POLICIES)
def test_weights_load_into_a_plain_model(micro, tmp_path, policies):
    pretrain(micro(policies), tmp_path / "run", tensorboard=False)
    for policy in policies:
        path = checkpoint.latest(tmp_path / "run" / "checkpoints") / f"{policy}.weights.safetensors"
        Transformer(MICRO.shape).load_state_dict(safetensors.torch.load_file(path), strict=True)


def test_leaves_the_process_as_it_was(micro, tmp_path):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]  # a job in the background ignores SIGINT
    pretrain(micro(steps=2), tmp_path / "run", tensorboard=False)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_sigterm_saves_too(micro, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    result = pretrain(micro(), tmp_path / "run", show=InterruptAt(3, signal.SIGTERM), tensorboard=False)
    assert (result.finished, result.step, result.signal) == (False, 3, signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_divergence_stops_one_arm_and_is_said(micro, tmp_path, monkeypatch):
    real = Arm._prepare

    def poison(self, step):
        real(self, step)
        if step == 5:
            self.model.norm.weight.data.fill_(float("inf"))

    monkeypatch.setattr(Arm, "_prepare", poison)
    result = pretrain(micro(), tmp_path / "run", tensorboard=False)
    assert result.finished and result.rows[0].diverged == 6 and result.rows[0].final_loss is None
    assert "diverged at step 6" in result.report.read_text()
    assert metrics(tmp_path / "run")[-1]["final_loss"] is None


def test_full_disk_while_logging_or_saving(micro, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(micro(), whole, tensorboard=False)
    real, room = disk.write, [4]

    def full(path, data):
        room[0] -= 1
        if room[0] < 0 and path.name.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(Stopped, match="step 4 could not be written: No space left on device; intact: .*step-00000000"):
        pretrain(micro(), parts, tensorboard=False)
    monkeypatch.undo()
    monkeypatch.setattr(
        "os.write", lambda fd, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
    )
    with pytest.raises(
        Stopped, match="metrics.jsonl could not be written: No space left on device; intact: .*step-00000000"
    ):
        resume(parts, tensorboard=False)
    monkeypatch.undo()
    resume(parts, tensorboard=False)
    assert metrics(parts) == metrics(whole)


def test_a_run_without_its_first_checkpoint_may_begin_again(micro, tmp_path, monkeypatch):
    real = disk.write

    def full(path, data):
        if path.name == "manifest.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    for name, again in (("a", lambda out: resume(out)), ("b", lambda out: pretrain(micro(), out, tensorboard=False))):
        with monkeypatch.context() as patch:
            patch.setattr(disk, "write", full)
            with pytest.raises(Stopped, match="no checkpoint had been written before"):
                pretrain(micro(), tmp_path / name, tensorboard=False)
        assert again(tmp_path / name).finished


def test_tensorboard_events(micro, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pretrain(micro(), tmp_path / "run", show=InterruptAt(5))
    resume(tmp_path / "run")
    events = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard" / "bf16")).Reload()
    assert [e.step for e in events.Scalars("train_loss")] == list(range(1, 11))
    logged = [line["valid_loss"] for line in metrics(tmp_path / "run") if "valid_loss" in line]
    assert [e.value for e in events.Scalars("valid_loss")] == pytest.approx(logged)


def test_learning_rate():
    rates = [learning_rate(step, MICRO) for step in range(10)]
    assert (
        rates[:2] == [0.005, 0.01]
        and rates[-1] == pytest.approx(0.001)
        and rates[2:] == sorted(rates[2:], reverse=True)
    )


def snapshot(path):
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_refuses_directories(micro, tmp_path):
    out = tmp_path / "run"
    pretrain(micro(), out, tensorboard=False)
    before = snapshot(tmp_path)
    with pytest.raises(Refused, match="holds this very run; to go on: --resume"):
        pretrain(micro(), out)
    with pytest.raises(Refused, match="another configuration .*seed: 0, now 1"):
        pretrain(micro(seed=1), out)
    with pytest.raises(Refused, match="another configuration .*preset.steps: 10, now 11"):
        pretrain(micro(steps=11), out)
    with pytest.raises(Refused, match="holds other files"):
        pretrain(micro(), tmp_path)
    with pytest.raises(Refused, match="not a directory"):
        pretrain(micro(), out / "config.json")
    with pytest.raises(Refused, match="not a run directory"):
        resume(tmp_path)
    with pytest.raises(Refused, match="another configuration .steps: 10, now 12."):
        resume(out, asked={"steps": 12})
    with pytest.raises(Refused, match="another configuration .policies: bf16, now bf16,mxfp8"):
        resume(out, asked={"policies": ("bf16", "mxfp8")})
    assert snapshot(tmp_path) == before


def test_refuses_broken_runs(micro, tmp_path):
    out = tmp_path / "run"
    pretrain(micro(), out, show=InterruptAt(5), tensorboard=False)
    open_run = rundir.reopen(out)
    with pytest.raises(Refused, match="another process"):
        resume(out)
    open_run.close()

    weights = checkpoint.latest(out / "checkpoints") / "bf16.weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.raises(Refused, match="bf16.weights.safetensors has 1000 of its"):
        resume(out)
    weights.write_bytes(whole)

    lines = (out / "metrics.jsonl").read_bytes()
    (out / "metrics.jsonl").write_bytes(lines[:20])
    with pytest.raises(Refused, match="metrics.jsonl: 20 bytes of"):
        resume(out)
    (out / "metrics.jsonl").write_bytes(lines)

    config = (out / "config.json").read_text()
    (out / "config.json").write_text(config.replace('"d": 32', '"d": 64'))
    with pytest.raises(Refused, match=r"config.json: not what was written \(run.preset.shape.d\)"):
        resume(out)
    (out / "config.json").write_text(config)

    (out / "config.json").write_bytes(digest.dumps(json.loads(config.replace('"d": 32', '"d": 64'))))
    with pytest.raises(Refused, match="config.json: not the one that .*manifest.json was written under"):
        resume(out)
    (out / "config.json").write_text(config)

    weights.parent.rename(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="no checkpoint in .*checkpoints, but metrics.jsonl has lines"):
        resume(out)
    with pytest.raises(Refused, match="no checkpoint in .*checkpoints, but metrics.jsonl has lines"):
        pretrain(micro(), out)
    assert (out / "metrics.jsonl").read_bytes() == lines
    (out / "config.json").write_text("{}")
    with pytest.raises(Refused, match="config.json: no digest in it"):
        resume(out)


def test_refuses_changed_text_and_takes_moved_text(micro, tmp_path, text):
    out, copy = tmp_path / "run", tmp_path / "moved" / text.name
    pretrain(micro(), out, show=InterruptAt(5), tensorboard=False)
    copy.parent.mkdir()
    copy.write_bytes(text.read_bytes() + b"x")
    with pytest.raises(Refused, match="its text has changed .*digest: "):
        resume(out, asked={"data": [str(copy)]})
    copy.write_bytes(text.read_bytes())
    assert resume(out, asked={"data": [str(copy)]}, tensorboard=False).finished
