"""Advice: it reproduces the policy that ships by measurement, keeps a budget, and says why."""

import sys
from dataclasses import replace

import pytest

import fp4ext
from fp4ext import policies
from fp4ext.audit import advise, machines
from fp4ext.audit.advice import Score, _scores
from fp4ext.policy import policy_file

MACHINE = machines.get("gb300")


def test_it_reproduces_end_to_end(model, batches, tmp_path):
    """For the demo's model, by measurement: sweep forward, MS-EDEN + sweep on two stages backward, as docs/training.md
    has it; the sampler's forward with an outer scale a row, the trainer on the sampler's operands."""
    advice = advise(model, batches, "error", machine=MACHINE, draws=8, tokens=128, most=3, budget=0.05)
    wanted = policies.get("end_to_end")
    assert advice.policy.pretrain == wanted.pretrain
    assert advice.policy.rl_sampler == wanted.rl_sampler and not advice.policy.rules
    assert advice.policy.recipe("rl_trainer", "m").fprop == wanted.recipe("rl_trainer", "m").fprop
    forward = {s.name: s for s in advice.ranked["forward"]}
    assert forward["bf16"].error < forward["mxfp8"].error < forward["sweep"].error < forward["amax"].error
    backward = {s.name: s for s in advice.ranked["backward"]}
    assert backward["nearest"].faults and backward["nearest"].drift > 3e-3
    two = backward["MS-EDEN + sweep, two stages"]
    assert not two.faults and two.error < backward["stochastic minvar"].error < backward["stochastic"].error
    text = advice.text("json")
    (tmp_path / "a.json").write_text(text)
    assert policy_file.load(tmp_path / "a.json") == advice.policy
    for place in ("pretrain.fprop.x", "pretrain.dgrad.dy", "rl_sampler.fprop.w", "rl_trainer.fprop.x", "keep"):
        assert any(c.isdigit() for c in advice.why[place]) or place.startswith("rl_trainer"), place
    if sys.version_info >= (3, 11):
        (tmp_path / "a.toml").write_text(advice.text())
        assert policy_file.load(tmp_path / "a.toml") == advice.policy
    fp4ext.convert(model, advice.policy)


def test_a_budget_takes_layers_out(model, batches):
    """A budget that all of 4 bits cannot keep."""
    advice = advise(model, batches, "speed", machine=MACHINE, draws=3, tokens=64, most=1, budget=1e-7)
    names = set(advice.policy.keep) - set(policies.get("end_to_end").keep)
    base, now = advice.loss
    assert names and names <= {n for n, m in model.named_modules()}
    assert now <= base * (1 + 1e-7) or len(names) == 8
    assert "allowed 0.00%" in advice.why["keep"]


def test_goals_rank_differently(monkeypatch):
    """Faults last, whatever the goal."""
    made = [
        Score("a", 3e-3, 2e-3, {"layer": "…"}, 1.0, 4.0),
        Score("b", 9e-3, 0.0, {}, 2.0, 4.5),
        Score("c", 7e-3, 0.0, {}, 3.0, 4.5),
        Score("d", 1e-3, 9e-5, {}, 9.0, 16.0),
    ]
    monkeypatch.setattr(
        fp4ext.audit.advice, "_score", lambda key, recipe, which, layers, machine, draws: made["abcd".index(key)]
    )
    ranked = {
        goal: "".join(s.name for s in _scores(dict.fromkeys("abcd"), "backward", [], None, 3, goal, lambda *a: None))
        for goal in ("error", "bias", "speed", "memory")
    }
    assert ranked == {"error": "dcba", "bias": "dcba", "speed": "bcda", "memory": "cbda"}
    # A layer that is sick under most candidates is an exception: it decides nothing, and hides nothing.
    made[:] = [replace(s, faults={"sick": "…"}, modules=8) for s in made]
    made[0], made[3] = replace(made[0], faults={}), replace(made[3], faults=dict.fromkeys("abc", "…"))
    ranked = _scores(dict.fromkeys("abcd"), "backward", [], None, 3, "speed", lambda *a: None)
    assert "".join(s.name for s in ranked) == "abcd"
    ranked = _scores(dict.fromkeys("abcd"), "backward", [], None, 3, "memory", lambda *a: None)
    assert "".join(s.name for s in ranked) == "acbd"


def test_what_it_refuses(model, batches):
    with pytest.raises(ValueError, match="unknown goal 'beauty'; accepted: error, bias, speed, memory"):
        advise(model, batches, "beauty", machine=MACHINE)
    with pytest.raises(ValueError, match="budget is 0"):
        advise(model, batches, machine=MACHINE, budget=0)
