"""RL on a tiny model: agreement to the bit, what breaks it, what it learns, and that nothing is lost when it stops."""

import json
import signal

import pytest
import torch

import fp4ext
from fp4ext.cli import main
from fp4ext.train import Config as PretrainConfig
from fp4ext.train import Refused, Shape, pretrain
from fp4ext.train.models.transformer import Transformer
from fp4ext.train.rl import Config, arms, reinforce, resume
from fp4ext.train.rl.learner import Learner
from fp4ext.train.rl.loop import Start, _with_task
from fp4ext.train.runs import checkpoint, presets

from ..conftest import MICRO, InterruptAt

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = Shape(layers=2, d=64, heads=2, ffn=96, context=24)
TINY = Shape(layers=1, d=32, heads=2, ffn=64, context=16)
TASK = """
class Digit:
    most, stop = 3, "."
    def prompt(self, rng): return "ab"[rng.integers(2)] * int(rng.integers(1, 6)) + ">"
    def reward(self, prompt, completion): return float(completion[:1] == prompt[0])
    def text(self, rng): return "".join(self.prompt(rng) + "ab"[rng.integers(2)] + "." for _ in range(2000))
"""


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "digit_task.py"
    path.write_text(TASK)
    return str(path)


def small(task, **changes) -> Config:
    given = {"steps": 6, "prompts": 6, "group": 4, "slots": 7, "rows": 10, "eval_prompts": 16, "save_every": 2}
    return Config(**(given | {"task": task, "threads": 1} | changes))


MIXTURE = Shape(layers=2, d=64, heads=2, ffn=32, context=24, experts=8, top_k=2, expert_ffn=32)


def weights(shape=SHAPE, seed=0):
    """Of a model that likes a few bytes, so that some completions earn something."""
    model = Transformer(shape, seed)
    torch.nn.init.normal_(model.lm_head.weight, std=0.2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.norm.weight.mul_(2)
    return model.state_dict()


@pytest.fixture
def start(task, tmp_path):
    """A pretraining run of a few steps on the task's text."""
    preset = MICRO.with_(shape=TINY, steps=40, eval_every=20, save_every=40)
    out = tmp_path / "start"
    pretrain(PretrainConfig(preset, policies=["end_to_end"], data=[f"task:{task}"], threads=1), out)
    return str(out)


AGREE = ("matched", "bf16", "quantized_backward")


@pytest.mark.parametrize("name", arms.NAMES)
def test_agreement(task, name):
    """Exactly 0 where trainer and sampler are one function, after updates too, in other batches; elsewhere not."""
    learner = Learner(name, small(task), SHAPE, weights())
    learner.task.reward = lambda prompt, completion: ord(completion[0]) % 2  # what a model of no skill can earn
    lines = [learner.step(step) for step in range(3)]
    d = [line["rollout_corr/max_abs_d"] for line in lines]
    assert d == [0, 0, 0] if name in AGREE else min(d) > 1e-4, d
    for line in lines:
        assert (line["rollout_corr/rollout_is_eff_sample_size"] == 1) is (name in AGREE)
        assert 1 <= line["response_length/mean"] <= 3 and line["actor/entropy"] > 0
    assert any(line["actor/grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize("policy", ["mxfp8", "nvidia", "four_over_six"])
def test_agreement_of_other_policies(task, policy):
    learner = Learner("matched", small(task, policy=policy), SHAPE, weights())
    assert [learner.step(step)["rollout_corr/max_abs_d"] for step in range(2)] == [0, 0]


@pytest.mark.parametrize("name", ["matched", "bf16", "mismatched"])
def test_agreement_of_a_mixture(task, name):
    learner = Learner(name, small(task), MIXTURE, weights(MIXTURE))
    learner.task.reward = lambda prompt, completion: ord(completion[0]) % 2
    before = {key: p.clone() for key, p in learner.model.named_parameters()}
    d = [learner.step(step)["rollout_corr/max_abs_d"] for step in range(3)]
    assert d == [0, 0, 0] if name in AGREE else min(d) > 1e-4, d
    assert all((p != before[key]).any() for key, p in learner.model.named_parameters())  # the router too


@pytest.mark.parametrize("kv_cache", ["mxfp8", "nvfp4"])
def test_agreement_through_a_quantized_cache(task, kv_cache):
    learner = Learner("matched", small(task, kv_cache=kv_cache), SHAPE, weights())
    assert [learner.step(step)["rollout_corr/max_abs_d"] for step in range(2)] == [0, 0]


def test_batch_shapes_do_not_matter(task):
    """Slots of the sampler and rows of the trainer: the same run."""
    runs = []
    for slots, rows in ((24, 24), (5, 7)):
        learner = Learner("matched", small(task, slots=slots, rows=rows), SHAPE, weights())
        lines = [learner.step(step) for step in range(3)]
        timed = ("seconds", "perf/tokens_per_second", "actor/entropy")  # the entropy's mean is torch's sum
        runs.append([{k: v for k, v in line.items() if k not in timed} for line in lines])
    assert runs[0] == runs[1]


def test_it_learns(task, start, tmp_path):
    """From about a half, by guessing, towards 1; and the rows say so."""
    done = reinforce(small(task, source=start, arms=["matched"], steps=30, prompts=16, lr=2e-3), tmp_path / "rl")
    (row,) = done.rows
    assert done.finished and row.max_abs_d == 0 and row.ess == 1 and row.weight_bits < 4.6
    assert 0.2 < row.reward_before < 0.7 and row.reward_after > row.reward_before + 0.2
    page = (tmp_path / "rl" / "report.html").read_text()
    assert "agreed to the bit on every token: matched" in page and "http" not in page.replace("http://www.w3", "")
    lines = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 32 and {"rollout_corr/kl", "critic/rewards/mean", "actor/pg_clipfrac"} <= lines[1].keys()


def timeless(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "perf/tokens_per_second")} for line in lines]


def test_stopped_and_resumed_is_the_same_run(start, task, tmp_path):
    config = small(task, source=start, arms=["matched", "tis", "quantized_backward"], steps=5, kl_coef=0.01)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    reinforce(config, whole)
    stopped = reinforce(config, cut, InterruptAt(3))
    assert not stopped.finished and stopped.step == 3 and stopped.signal == signal.SIGINT
    assert resume(cut, task_file=task).finished
    assert timeless(cut) == timeless(whole)
    ours, theirs = (checkpoint.load(path / "checkpoints")[1] for path in (cut, whole))
    for name, tensors in theirs.items():
        assert all(torch.equal(ours[name][key], t) for key, t in tensors.items()), name


def test_refuses_what_changed(start, task, tmp_path):
    out = tmp_path / "rl"
    reinforce(small(task, source=start, arms=["bf16"], steps=3), out, InterruptAt(1))
    with open(task, "a") as file:
        file.write("\n# another reward\n")
    with pytest.raises(Refused, match="its task .* has changed"):
        resume(out, task_file=task)


def test_refuses_a_task_that_does_not_fit(start, task, tmp_path):
    long = tmp_path / "long_task.py"
    long.write_text(TASK.replace("int(rng.integers(1, 6))", "14"))
    with pytest.raises(Refused, match="prompts of 15 bytes and answers of 3; accepted by .*: less than 16 together"):
        reinforce(small(str(long), source=start, steps=1), tmp_path / "never")
    begin = Start.read(start)
    begin.data = ["/some/text"]
    with pytest.raises(Refused, match="pretrained on text, not on a task; accepted: --task arithmetic or FILE.py"):
        _with_task(small(None, source=start), begin)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--arms", "bf16,magic"], "unknown arm 'magic'; accepted: matched, mismatched"),
        (["--arms", "bf16,bf16"], "'bf16' is given twice"),
        (["--policy", "bf16"], "--policy: 'bf16'; accepted: mxfp8, nvidia"),
        (["--group", "1"], "--group: 1; accepted: a whole number from 2"),
        (["--lr", "-1"], "--lr: -1.0; accepted: a number above 0"),
        (["--lr", "fast"], "--lr: 'fast'; accepted: a number"),
        (["--temperature", "nan"], "--temperature: nan"),
        (["--kv-cache", "int4"], "--kv-cache: 'int4'; accepted: bf16, mxfp8, nvfp4"),
        (["--level", "word"], "--level: 'word'; accepted: token, sequence"),
        (["--task", "poetry"], "unknown task 'poetry'; accepted: arithmetic"),
        (["--from", "nowhere"], "nowhere: not a run directory"),
        (["--resume", "nowhere"], "nowhere: not a run directory"),
        (["--resume", "nowhere", "--lr", "1"], "--lr beside --resume; accepted: --resume alone"),
    ],
)
def test_the_command_refuses_in_one_line(capsys, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["rl", *argv])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and words in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command(capsys, start, task, tmp_path, monkeypatch):
    """Lines while it goes on, a table at the end; resuming a finished run says the same again."""
    out = tmp_path / "rl"
    argv = f"--from {start} --task {task} --arms matched --steps 2 --prompts 4 --group 2 --threads 1".split()
    assert main(["rl", *argv, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "reward on the evaluation's prompts: matched" in said and "report:" in said
    assert main(["rl", "--resume", str(out), "--task", task]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["command"].startswith(f"python -m fp4ext rl --from {start} --arms matched --task {task}")
    assert config["run"]["task"] == task
    with pytest.raises(SystemExit):
        main(["rl", *argv, "--out", str(out)])
    assert f"--resume {out}" in capsys.readouterr().err


def test_a_policy_of_ones_own(start, task, tmp_path):
    """From a file, as `audit` writes it: the run keeps it, and its sampler and trainer agree to the bit."""
    mine = fp4ext.policies.get("nvidia").with_(name="mine", keep=("lm_head", "*.down"))
    file = tmp_path / "mine.json"
    file.write_text(fp4ext.policy.policy_file.dumps(mine, form="json"))
    config = small(task, source=start, arms=["matched"], policy=str(file), steps=2, save_every=1)
    assert config.policy == "mine" and config.chosen == mine
    stopped = reinforce(config, tmp_path / "rl", InterruptAt(1))
    file.unlink()
    assert not stopped.finished and resume(tmp_path / "rl", task_file=task).rows[0].max_abs_d == 0
    said = json.loads((tmp_path / "rl" / "config.json").read_text())
    assert f"--policy {file}" in said["command"] and said["run"]["policy"] == "mine"
    for argv, words in (([str(file)], "No such file"), (["x.toml"], "policy file x.toml")):
        with pytest.raises(Refused, match=f"--policy: .*{words}"):
            small(task, source=start, policy=argv[0])
    file.write_text(fp4ext.policy.policy_file.dumps(mine.with_(name="nvidia"), form="json"))
    with pytest.raises(Refused, match="names its policy 'nvidia'; accepted: a name of its own"):
        small(task, source=start, policy=str(file))


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["rl", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in arms.NAMES) and "--task examples/reverse_task.py" in said


@pytest.mark.slow
def test_without_a_start_it_makes_one(task, tmp_path, monkeypatch):
    micro = MICRO.with_(shape=TINY, steps=6)
    monkeypatch.setitem(presets.PRESETS, "task", micro)
    out = tmp_path / "rl"
    config = small(task, arms=["matched"], steps=2)
    show = InterruptAt(4)
    show.of = lambda view: show
    assert not reinforce(config, out, show).finished and not (out / "start" / "result.json").exists()
    assert resume(out, task_file=task).finished and (out / "start" / "report.html").exists()
