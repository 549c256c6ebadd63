"""The four stages on a small model: what they leave, and that no death of the process shows in it."""

import json
import shutil
import signal

import pytest

from fp4ext.cli import main
from fp4ext.export import Checkpoint
from fp4ext.export.writer import Writer
from fp4ext.testing import assert_bytes_equal
from fp4ext.train import Refused, Shape, exported
from fp4ext.train.end_to_end import Config, Result, end_to_end, loop, resume
from fp4ext.train.end_to_end.config import command
from fp4ext.train.end_to_end.display import Lines, Stages
from fp4ext.train.rl import Config as RlConfig
from fp4ext.train.rl import reinforce
from fp4ext.train.runs import checkpoint, presets
from fp4ext.train.sampler import Request, Sampler

from .conftest import MICRO, InterruptAt

MOE = Shape(layers=1, d=32, heads=2, ffn=32, context=16, experts=4, top_k=2, expert_ffn=32)
PRESET = MICRO.with_(name="micro-moe", shape=MOE, steps=6, batch=4)
TASK = """
class Digit:
    most, stop = 2, "."
    def prompt(self, rng): return "ab"[rng.integers(2)] * int(rng.integers(1, 6)) + ">"
    def reward(self, prompt, completion): return float(completion[:1] == prompt[0])
    def text(self, rng): return "".join(self.prompt(rng) + "ab"[rng.integers(2)] + "." for _ in range(400))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "digit_task.py"
    path.write_text(TASK)

    def make(**changes) -> Config:
        given = {"preset": PRESET, "policies": ["end_to_end"], "arms": ["matched"], "rl_steps": 3, "prompts": 3}
        return Config(**(given | {"task": str(path), "group": 2, "threads": 1} | changes))

    return make


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """A run that nobody disturbed, and what it said."""
    said = []
    out = tmp_path_factory.mktemp("whole") / "run"
    return end_to_end(job(), out, Lines(said.append), tensorboard=False), said


def test_what_it_leaves(whole, job, tmp_path, capsys):
    result, said = whole
    assert result.finished and result.reloaded.same and result.reloaded.tokens == 64 * 16 - sum_of_prompts(result)
    (row,) = result.reinforced.rows
    assert row.max_abs_d == 0 and 0 <= row.reward_before <= 1 and row.ess == 1
    e = result.exported
    assert (e.layout, e.formats) == ("fp4ext", {"nvfp4": 6}) and 4.5 < e.bits < 4.6 and e.bytes < e.file_bytes
    held = sum(p.numel() for p in exported.of_run(result.out / "rl").model.state_dict().values())
    assert e.bf16_bytes == 2 * held
    assert [line[:7] for line in said if "done" in line] == [f"stage {n}" for n in (1, 2, 3, 4)]
    page = result.report.read_text()
    for words in ("agreed to the bit on every token", "log-probs to the bit", "1 Pretraining", "python -m fp4ext"):
        assert words in page, words
    found = json.loads((result.out / "result.json").read_text())
    assert found["reload"]["tokens_equal"] == result.reloaded.tokens and set(found["seconds"]) == set(loop.STAGES)
    # All is there: going on says the same, and computes nothing.
    assert main(["end-to-end", "--resume", str(result.out), "--task", job().task]) == 0
    table = capsys.readouterr().out
    assert "4 reload" in table and f"{result.reloaded.tokens} of {result.reloaded.tokens} tokens" in table


def sum_of_prompts(result: Result) -> int:
    config = Config.from_dict(json.loads((result.out / "config.json").read_text())["run"])
    return sum(len(request.prompt) for request in loop._requests(config, None))


def test_the_folder_is_enough(whole, tmp_path):
    """Moved away from its run, the checkpoint is still the whole model: logits of the arm's sampler, bit for bit."""
    result, _ = whole
    shutil.copytree(result.checkpoint, tmp_path / "moved")
    requests = [Request((97, 62), most=9), Request((98,), most=14, temperature=0)]
    model = exported.of_run(result.out / "rl").model
    ours, theirs = (Sampler(m).generate(requests) for m in (model, exported.load(tmp_path / "moved")))
    assert ours == theirs
    # What `export` writes of a run is the same checkpoint; of the pretrained run, one that loads as well.
    assert main(["export", str(result.out / "rl"), str(tmp_path / "again"), "--layout", "fp4ext"]) == 0
    same_checkpoint(tmp_path / "again", tmp_path / "moved")
    assert main(["export", str(result.out / "pretrain"), str(tmp_path / "start"), "--layout", "fp4ext"]) == 0
    assert Sampler(exported.load(tmp_path / "start")).generate(requests) != ours
    config = json.loads((tmp_path / "moved" / "config.json").read_text())
    for change, words in (({"model_type": "llama"}, "model_type 'llama'"), ({"shape": {"d": 3}}, "not as `export`")):
        (tmp_path / "moved" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(Refused, match=words):
            exported.load(tmp_path / "moved")


def same_checkpoint(ours, theirs):
    """Byte for byte, but for the order of a header's metadata."""
    assert {p.name for p in ours.iterdir()} == {p.name for p in theirs.iterdir()}
    a, b = Checkpoint(ours), Checkpoint(theirs)
    assert (a.config, a.folder.metadata, set(a.folder.slots)) == (b.config, b.folder.metadata, set(b.folder.slots))
    for name in b.folder.slots:
        assert_bytes_equal(a.folder.read(name), b.folder.read(name), name)


class Death(BaseException):
    """Of the process, as far as files are concerned."""


class Dying(Stages):
    """Dies as a stage begins; asks to stop (or dies) in a step of one of the first two."""

    def __init__(self, begin: str | None = None, stage: str | None = None, step: int = 0, dies: bool = False):
        self.at, self.stage, self.number, self.dies = begin, stage, step, dies

    def begin(self, stage):
        if stage == self.at:
            raise Death

    def display(self, stage):
        if stage != self.stage:
            return super().display(stage)
        show = InterruptAt(None if self.dies else self.number, signal.SIGTERM)
        if self.dies:
            show.step = lambda done, lines: self._die(done)
        return show

    def _die(self, done: int):
        if done == self.number:
            raise Death


def test_dead_anywhere_and_resumed_it_is_the_same_run(whole, job, tmp_path, monkeypatch):
    undisturbed, _ = whole
    out = tmp_path / "run"

    def go_on(show):
        return resume(out, show, tensorboard=False, task_file=job().task)

    stopped = end_to_end(job(), out, Dying(stage="pretrain", step=2), tensorboard=False)
    assert (stopped.finished, stopped.at, stopped.signal) == (False, "step 2 of stage 1, pretrain", signal.SIGTERM)
    for show in (Dying(stage="pretrain", step=5, dies=True), Dying(begin="rl")):
        with pytest.raises(Death):
            go_on(show)
    assert not (out / "rl").exists()
    stopped = go_on(Dying(stage="rl", step=1))
    assert stopped.at == "step 1 of stage 2, rl" and not (out / "rl" / "result.json").exists()
    for show in (Dying(stage="rl", step=2, dies=True), Dying(begin="export")):
        with pytest.raises(Death):
            go_on(show)
    with monkeypatch.context() as patch:  # all bytes written, and not yet in their place
        patch.setattr("fp4ext.export.writer.publish", lambda *given: (_ for _ in ()).throw(Death))
        patch.setattr("fp4ext.export.writer.shutil.rmtree", lambda path, ignore_errors: None)
        with pytest.raises(Death):
            go_on(Stages())
    assert not (out / "checkpoint").exists() and list(out.glob(".checkpoint.writing-*"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_compare", lambda *given: (_ for _ in ()).throw(Death))
        with pytest.raises(Death):
            go_on(Stages())
    assert (out / "checkpoint").exists() and not (out / "reload.json").exists()
    assert go_on(Stages()).finished
    same_checkpoint(out / "checkpoint", undisturbed.checkpoint)
    assert (out / "reload.json").read_bytes() == (undisturbed.out / "reload.json").read_bytes()
    for stage in ("pretrain", "rl"):
        ours, theirs = (checkpoint.load(r / stage / "checkpoints")[1] for r in (out, undisturbed.out))
        for name, tensors in theirs.items():
            for key, t in tensors.items():
                assert_bytes_equal(ours[name][key], t, f"{name}.{key}")
        assert timeless(out / stage) == timeless(undisturbed.out / stage)


def timeless(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "perf/tokens_per_second")} for line in lines]


def test_a_checkpoint_that_says_otherwise_is_told(whole, job, tmp_path, capsys):
    """Exit code 1, after one code of one weight has changed."""
    out = tmp_path / "run"
    shutil.copytree(whole[0].out, out)
    with Writer(out / "checkpoint", overwrite=True) as writer:
        there = Checkpoint(whole[0].checkpoint)
        writer.say(there.folder.metadata)
        for name in there.folder.slots:
            t = there.folder.read(name)
            writer.add(name, t.flip(0) if name == "blocks.0.attention.out.weight.codes" else t)
        writer.files["config.json"] = there.config
    (out / "reload.json").unlink()
    assert main(["end-to-end", "--resume", str(out), "--task", job().task]) == 1
    said = capsys.readouterr().out
    assert "the checkpoint is not what was written" in said and "nat apart" in said
    assert "class=bad" in (out / "report.html").read_text()


def test_stops_while_it_exports(whole, job, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    shutil.copytree(whole[0].out, out)
    shutil.rmtree(out / "checkpoint")
    (out / "reload.json").unlink()
    read = loop.Exported.read

    def press(path):
        signal.raise_signal(signal.SIGINT)
        return read(path)

    monkeypatch.setattr(loop.Exported, "read", press)
    assert main(["end-to-end", "--resume", str(out), "--task", job().task]) == 130
    said = capsys.readouterr().out
    assert (
        f"saved after stage 3, export; to go on: python -m fp4ext end-to-end --resume {out} --task {job().task}" in said
    )


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--preset", "huge"], "unknown preset 'huge'; presets: tiny"),
        (["--arms", "bf16,matched"], "the first goes on to a 4-bit checkpoint; accepted: one of 4 bits first"),
        (["--policies", "bf16,nvidia"], "end_to_end is to go on; accepted: it among them"),
        (["--layout", "inkling2"], "this model is not read back from 'inkling2'; accepted: fp4ext"),
        (["--preset", "task", "--layout", "gpt-oss"], "accepted: fp4ext, compressed-tensors, modelopt"),
        (["--task", "poetry"], "unknown task 'poetry'"),
        (["--rl-steps", "0"], "--rl-steps: '0'; accepted: a whole number from 1"),
        (["--resume", "nowhere"], "nowhere: not a run directory"),
        (["--resume", "nowhere", "--rl-steps", "2"], "--rl-steps beside --resume; accepted: --resume alone"),
    ],
)
def test_refuses_in_one_line(capsys, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["end-to-end", *argv])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and words in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_another_run_is_left_alone(whole, job, tmp_path):
    with pytest.raises(Refused, match="holds this very run; to go on: --resume"):
        end_to_end(job(), whole[0].out)
    with pytest.raises(Refused, match="holds a run of another configuration .*rl_steps: 3, now 4"):
        end_to_end(job(rl_steps=4), whole[0].out)


def test_a_policy_of_ones_own(tmp_path):
    """By its file, from the first stage to the config of the last; the command names the file."""
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\n[pretrain.fprop]\nx = "nvfp4/sweep"\nw = "nvfp4/sweep"\n')
    config = Config(policies=f"bf16,{mine}", policy=str(mine))
    assert (config.policies, config.policy) == (("bf16", "mine"), "mine")
    assert config.reinforcing().chosen == config.pretraining().policy("mine")
    assert f"--policies bf16,{mine} --policy {mine} " in command(config)
    mine.unlink()
    assert Config.from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_presets_fit_the_task(tmp_path):
    assert Config(presets.get("moe-task")).layout == "fp4ext"
    config = Config(PRESET.with_(shape=Shape(layers=1, d=32, heads=1, ffn=32, context=6)), policies=["end_to_end"])
    with pytest.raises(Refused, match="prompts of 4 bytes and answers of 3; accepted: less than 6 together"):
        end_to_end(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_inkling2_goes_all_the_way(job, tmp_path):
    """transformers' own class: trained, reinforced with d = 0, and loaded by transformers to the same tokens."""
    pytest.importorskip("transformers", minversion="5.24")
    shape = Shape(layers=2, d=32, heads=2, ffn=0, context=32, experts=4, top_k=2, expert_ffn=32)
    preset = PRESET.with_(name="inkling2-micro", model="inkling2", shape=shape, steps=4, eval_windows=4)
    result = end_to_end(job(preset=preset, rl_steps=2), tmp_path / "run", tensorboard=False)
    (row,) = result.reinforced.rows
    assert row.max_abs_d == 0 and result.exported.layout == "inkling2" and result.exported.formats == {"nvfp4": 4}
    assert result.reloaded.same and result.reloaded.tokens == 16 * 16 and "transformers" in result.reloaded.by
    assert 0 <= result.reloaded.sampler_equal <= 16 * 16
    with pytest.raises(Refused, match="--kv-cache nvfp4: inkling2 is sampled without a cache; accepted: bf16"):
        reinforce(RlConfig(source=str(result.out / "pretrain"), task=job().task, kv_cache="nvfp4"), tmp_path / "rl")
    names = list(Checkpoint(result.checkpoint))
    assert "model.llm.layers.0.mlp.experts.w13_weight" in names
