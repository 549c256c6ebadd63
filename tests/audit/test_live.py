"""Live statistics: counted where asked, free elsewhere, and a run's bits are what they were."""

import json
import time

import pytest
import torch

import fp4ext
from fp4ext import policies
from fp4ext.audit import Monitor, live
from fp4ext.train import Config, pretrain, resume
from fp4ext.train.runs import directory as run

from .conftest import PRESET

SHORT = PRESET.with_(steps=6, eval_every=3, save_every=3, log_every=3, eval_windows=4, final_windows=4)


def config(corpus_file, **changes):
    return Config(SHORT, policies=["bf16", "end_to_end"], data=[corpus_file], threads=1, **changes)


@pytest.fixture(scope="module")
def text():
    import argparse

    return argparse.__file__


def test_a_run_keeps_its_bits_and_gains_lines(text, tmp_path):
    plain = pretrain(config(text), tmp_path / "plain", tensorboard=False)
    watched = pretrain(config(text, stats=2), tmp_path / "watched")
    assert [r.final_loss for r in plain.rows] == [r.final_loss for r in watched.rows]
    lines = run.read_metrics(tmp_path / "watched")
    seen = [(line["step"], line["policy"]) for line in lines if "stats" in line]
    assert seen == [(step, "end_to_end") for step in (1, 3, 5)]
    stats = [line for line in lines if "stats" in line][1]["stats"]
    assert len(stats) == 8 and set(stats["blocks.0.mlp.down"]) == {"x", "w", "dy", "ratio"}
    w = stats["blocks.1.attention.qkv"]["w"]
    assert 20 < w["snr_db"] < 24 and w["underflow"] == 0 and sum(w["histogram"].values()) == 64 * 128 // 16
    assert json.loads((tmp_path / "watched" / "config.json").read_text())["run"]["stats"] == 2
    assert "--stats 2" in json.loads((tmp_path / "watched" / "config.json").read_text())["command"]
    tags = {tag for tag, _ in run.scalars({"stats": stats})}
    assert "stats/blocks.0.mlp.down/dy/amax" in tags and not any("histogram" in tag for tag in tags)
    from tensorboard.backend.event_processing import event_accumulator as reader

    events = reader.EventAccumulator(str(tmp_path / "watched" / "tensorboard" / "end_to_end")).Reload()
    assert [e.step for e in events.Scalars("stats/blocks.0.mlp.down/dy/underflow")] == [1, 3, 5]
    assert resume(tmp_path / "watched", asked={"stats": 2}).finished


def test_policy_files_are_arms(text, tmp_path):
    mine = policies.get("nvidia").with_(name="mine", keep_last=0.5).log_stats(every=4)
    path = tmp_path / "mine.json"
    path.write_text(fp4ext.policy.policy_file.dumps(mine, form="json"))
    c = Config(SHORT, policies=["bf16", str(path)], data=[text], threads=1)
    result = pretrain(c, tmp_path / "run", tensorboard=False)
    assert [row.policy for row in result.rows] == ["bf16", "mine"] and result.rows[1].converted == 4
    assert any("stats" in line for line in run.read_metrics(tmp_path / "run"))
    path.unlink()  # the run has it
    assert resume(tmp_path / "run").rows == result.rows
    path.write_text(fp4ext.policy.policy_file.dumps(mine.with_(name="nvidia"), form="json"))
    with pytest.raises(fp4ext.train.Refused, match="names its policy 'nvidia'; accepted: a name of its own"):
        Config(SHORT, policies=[str(path)], data=[text])
    with pytest.raises(fp4ext.train.Refused, match="policy file .*none.toml: No such file"):
        Config(SHORT, policies=["none.toml"], data=[text])


def test_warnings_name_module_and_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    fp4ext.convert(model, policies.get("end_to_end").log_stats(every=5))
    monitor = Monitor(model)
    x = torch.randn(96, 64)

    def step(n):
        with monitor.watch(n):
            model(x).square().mean().backward()
        return monitor.line

    assert step(0)["warnings"] == [] and step(1) is None and step(5)["warnings"] == []
    with torch.no_grad():
        model[0].weight[0, 0] = 1e6
    assert any("step 11, 0, w: 9" in w and "underflow" in w for w in step(10)["warnings"])
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    assert any("step 16, 0, w:" in w and "not finite" in w for w in step(15)["warnings"])


def test_the_sqrt3_rule_is_looked_at():
    """Each token twice, pulled both ways: the gradient cancels, the noise of its rounding does not."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 64))
    fp4ext.convert(model, "nvidia")
    x, pull = torch.randn(128, 128).repeat(2, 1), torch.randn(128, 64)
    pull = torch.cat((pull, -pull))
    monitor = Monitor(model, every=1)
    drawn = []
    for n in range(5):
        torch.manual_seed(7)
        with monitor.watch(n, lambda: (model(x) * pull).sum()):
            (model(x) * pull).sum().backward()
        drawn.append(torch.rand(1).item())
        assert ("ratio" in monitor.line["stats"]["0"]) == (n % live.NOISE_EVERY == 1)
        assert any("under √3" in w for w in monitor.line["warnings"]) == (n % live.NOISE_EVERY == 1)
    assert len(set(drawn)) == 1


def test_oscillating_weights():
    still, other = torch.tensor([[0x11, 0x21]], dtype=torch.uint8), torch.tensor([[0x12, 0x21]], dtype=torch.uint8)
    flipping = [still, other] * 3 + [still, still]
    assert live.oscillating(flipping) == 0.25 and live.oscillating([still] * 8) == 0 == live.oscillating(flipping[:5])
    rising = [torch.full((1, 2), code, dtype=torch.uint8) for code in range(8)]
    assert live.oscillating(rising) == 0


def test_each_kind_of_warning_says_what_to_do():
    counts = {"non_finite": 0.0, "underflow": 0.0, "saturation": 0.0, "oscillating": 0.0}
    kinds = {
        "non_finite": (0.001, "are not finite; lower the learning rate"),
        "underflow": (0.02, "underflow to zero; try outer='row', or MXFP8 there"),
        "saturation": (0.2, "saturate; use a scale rule that rounds up"),
        "oscillating": (0.06, "flip between two codes; lower the learning rate"),
    }
    for what, (share, words) in kinds.items():
        (said,) = live.warnings_of({"a": {"w": counts | {what: share}}, "b": {"w": counts}}, 7)
        assert said.startswith(f"step 7, a, w: {share:.1%} of the ") and words in said
    (said,) = live.warnings_of({"a": {"w": counts, "ratio": 1.5}, "b": {"w": counts, "ratio": 1.8}}, 7)
    assert said.startswith("step 7: ") and "(under √3) in 1 of 2 layers, most in a (1.50)" in said


def test_weights_that_swing_are_warned_of():
    """A run whose weights go back and forth over a midpoint of the grid, as they do at the end of one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    fp4ext.convert(model, "end_to_end")
    monitor, w = Monitor(model, every=1), model[0].weight.detach().clone()
    for n in range(live.WINDOW + 1):
        with torch.no_grad():
            model[0].weight.copy_(w * (1 + 0.05 * (-1) ** n * torch.sign(torch.randn(64, 64))))
            model[0].weight[:, :1] = 1.0  # the scales stay
        with monitor.watch(n):
            model(torch.randn(32, 64))
        assert any("flip between two codes" in said for said in monitor.line["warnings"]) == (n >= live.WINDOW - 1)


def test_other_steps_cost_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    fp4ext.convert(model, "end_to_end")
    monitor = Monitor(model, every=10**6)
    began = time.thread_time()
    for n in range(1, 2001):
        with monitor.watch(n):
            pass
    assert time.thread_time() - began < 0.2
    assert Monitor(model).every == 0
