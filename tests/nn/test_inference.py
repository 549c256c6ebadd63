"""Inference: in eval mode without gradients, and in the RL stages, a row's result does not depend on its batch."""

import pytest
import torch
from torch import nn

import fp4ext
from fp4ext import Fprop, Policy, Recipe, Spec, policies
from fp4ext.policy import policy_file
from fp4ext.testing import assert_bytes_equal

QUANTIZED = [name for name in policies.names() if name != "bf16"]
SCALES = torch.exp2(torch.arange(24.0) - 12)[:, None]  # rows of sizes far apart


def layer(policy):
    torch.manual_seed(0)
    return fp4ext.Linear(80, 48, policy=policy)


def x():
    return torch.randn(24, 80, generator=torch.Generator().manual_seed(1)) * SCALES


def mine(fprop):
    return Policy("mine", Recipe(fprop))


# Policies without a sampler of their own: plain, of a file, with a rule, 16×16 weights
OWN = {
    "no sampler": mine(Fprop(Spec("nvfp4", "sweep"), Spec("nvfp4", "sweep"))),
    "file": policy_file.from_dict({"name": "f", "pretrain": {"fprop": {"x": "nvfp4/sweep", "w": "nvfp4/sweep"}}}),
    "16x16 weights": mine(Fprop(Spec("nvfp4"), Spec("nvfp4", block="16x16"))),
    "mxfp8": mine(Fprop(Spec("mxfp8"), Spec("mxfp8"))),
    "rule": Policy("mine", rules=(("*", Recipe(Fprop(Spec("nvfp4"), Spec("nvfp4")))),)),
}
POLICIES = {name: policies.get(name) for name in QUANTIZED} | OWN


@pytest.mark.parametrize("way", ["eval", "rl_sampler", "rl_trainer"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_is_independent_of_its_batch(policy, way):
    m = layer(POLICIES[policy]).train(way != "eval")

    @torch.no_grad()
    def run(t):
        if way == "eval":
            return m(t)
        with fp4ext.stage(way):
            return m(t)

    whole = run(x())
    assert_bytes_equal(torch.cat([run(t) for t in x().split([1, 7, 16])]), whole)
    assert POLICIES[policy].row_variant() == {} and m.recipes["rl_sampler"].quantizes


@pytest.mark.parametrize("policy", QUANTIZED)
def test_eval_mode_is_the_sampler_and_the_packed_model(policy):
    m = nn.Sequential(nn.Linear(80, 48))
    fp4ext.convert(m, policy)
    with torch.no_grad():
        got = m.eval()(x())
        with fp4ext.stage("rl_sampler"):
            assert_bytes_equal(m.train()(x()), got)
    assert_bytes_equal(fp4ext.pack(m)(x()), got)


def test_when_eval_mode_is_not_inference():
    """With gradients, inside a stage that is asked for, and where the forward has gone back to BF16."""
    m, t = layer("end_to_end").eval(), x()
    trained = m.train()(t).detach()
    m.eval()
    assert_bytes_equal(m(t).detach(), trained)
    with torch.no_grad():
        with fp4ext.stage("pretrain"):
            assert_bytes_equal(m(t), trained)
        assert not torch.equal(m(t), trained)
        late = layer(policies.get("end_to_end").with_(bf16_forward_from=10)).eval()
        assert_bytes_equal(late(t), m(t))
        late.set_step(10)
        assert_bytes_equal(late(t), nn.functional.linear(t, m.weight, m.bias))


def test_experts_in_eval_mode():
    m, ends = fp4ext.Experts(3, 64, 48), torch.tensor([8, 8, 24], dtype=torch.int32)
    t = torch.randn(24, 64) * SCALES
    with torch.no_grad():
        whole = m.eval()(t, ends)
        with fp4ext.stage("rl_sampler"):
            assert_bytes_equal(m(t, ends), whole)
    parts = [(t[:1], [1, 1, 1]), (t[1:8], [7, 7, 7]), (t[8:], [0, 0, 16])]
    with torch.no_grad():
        got = torch.cat([m(rows, torch.tensor(at, dtype=torch.int32)) for rows, at in parts])
    assert_bytes_equal(got, whole)


VARIANT = {
    "one outer scale": Policy("p", Recipe(), Recipe(Fprop(Spec("nvfp4"), Spec("nvfp4")))),
    "16x16 blocks": mine(Fprop(Spec("nvfp4", block="16x16"), Spec("nvfp4"))),
    "at random": Policy("p", Recipe(), Recipe(Fprop(Spec("nvfp4", rht="16"), Spec("nvfp4", rht="16")))),
}


@pytest.mark.parametrize("why", VARIANT)
def test_a_policy_that_cannot_says_where(why, tmp_path):
    found = VARIANT[why].row_variant()
    assert set(found) == {"rl_sampler", "rl_trainer"} and why in found["rl_sampler"]
    if why == "one outer scale":
        m = nn.Sequential(nn.Linear(64, 64))
        with pytest.warns(UserWarning, match="a row's result depends on its batch"):
            report = fp4ext.export.save(m, tmp_path / "out", policy=VARIANT[why], progress=False)
        assert any("rl_sampler" in warning for warning in report.warnings)


@pytest.mark.parametrize("policy", ["nvidia", "end_to_end"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
def test_generation_does_not_depend_on_the_cache(name, policy):
    """transformers' own generate, greedy: the same tokens with and without a cache."""
    from tests.test_compile import transformers_model

    m = transformers_model(name).eval()
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(3 if p.dim() >= 2 else 1)  # logits of a fresh model are nearly equal
    fp4ext.convert(m, policy)
    ids = torch.randint(0, 128, (1, 12), generator=torch.Generator().manual_seed(5))
    kind = dict(do_sample=False, max_new_tokens=24, pad_token_id=0)
    assert torch.equal(m.generate(ids, use_cache=True, **kind), m.generate(ids, use_cache=False, **kind))
