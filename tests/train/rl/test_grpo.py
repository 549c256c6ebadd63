"""GRPO by hand: advantages, the clipped loss and its gradient, guards, measures."""

import math

import pytest
import torch

from fp4ext.train.rl import grpo


def test_advantages():
    a = grpo.advantages(torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1]), 4)
    s = math.sqrt(3) / 4
    torch.testing.assert_close(a[:4], torch.tensor([0.75, -0.25, -0.25, -0.25]) / (s + 1e-6))
    assert (a[4:] == 0).all()


def case():
    """Two sequences of two and three tokens; advantages of both signs."""
    old = torch.log(torch.tensor([[0.5, 0.2, 0.9], [0.1, 0.4, 0.3]]))
    mask = torch.tensor([[True, True, False], [True, True, True]])
    return old, torch.tensor([1.0, -2.0]), torch.ones(2, 3), mask


def test_on_policy_the_gradient_is_the_policy_gradient():
    """ratio 1, nothing clipped: dL/dlogπ = −w·A / tokens, 0 where the mask is."""
    old, advantage, weight, mask = case()
    weight = weight * 0.5
    logprobs = old.clone().requires_grad_()
    loss, clipped = grpo.loss(logprobs, old, advantage, weight, mask)
    loss.backward()
    wanted = -0.5 * advantage[:, None] * mask / 5
    torch.testing.assert_close(logprobs.grad, wanted)
    assert clipped == 0
    logprobs.grad = None
    grpo.loss(logprobs, old, advantage, weight, mask, level="sequence")[0].backward()
    torch.testing.assert_close(logprobs.grad, -0.5 * advantage[:, None] * mask / torch.tensor([[2.0], [3.0]]) / 2)


def test_clipping():
    """Beyond 1 ± ε a token that moves the way its advantage wants has no gradient; one that moves against it has."""
    old, advantage, weight, mask = case()
    moved = (old + torch.log(torch.tensor([[1.5, 0.5, 9.0], [1.5, 0.5, 1.0]]))).requires_grad_()
    loss, clipped = grpo.loss(moved, old, advantage, weight, mask, clip=0.2)
    # A = 1: min(1.5, 1.2), min(0.5, 0.8); A = −2: min(−3, −2.4), min(−1, −1.6), −2
    torch.testing.assert_close(loss, torch.tensor(-(1.2 + 0.5 - 3 - 1.6 - 2) / 5))
    loss.backward()
    zero = torch.tensor([[True, False, True], [False, True, False]])
    assert torch.equal(moved.grad == 0, zero) and clipped == 2 / 5


def test_kl_to_a_reference():
    old, advantage, weight, mask = case()
    reference = old + 0.3
    plain, _ = grpo.loss(old, old, advantage, weight, mask)
    held, _ = grpo.loss(old, old, advantage, weight, mask, reference=reference, kl_coef=2.0)
    torch.testing.assert_close(held - plain, torch.tensor(2 * (math.exp(0.3) - 1 - 0.3)))


def test_guards():
    d = torch.log(torch.tensor([[0.4, 1.0, 3.0], [1.2, 1.1, 6.0]]))
    mask = torch.tensor([[True, True, True], [True, True, False]])
    r = d.exp()
    assert torch.equal(grpo.guard("none", d, mask), torch.ones(2, 3))
    torch.testing.assert_close(grpo.guard("token_tis", d, mask), torch.tensor([[0.4, 1, 2], [1.2, 1.1, 2]]))
    # Products 1.2 and 1.32, the masked 6 not counted: both stay; with 3 → 9 the first is 3.6 and goes.
    assert (grpo.guard("sequence_rejection", d, mask) == 1).all()
    d2 = d + torch.log(torch.tensor([[1.0, 1, 3], [1, 1, 1]]))
    assert torch.equal(grpo.guard("sequence_rejection", d2, mask), torch.tensor([[0.0], [1.0]]).expand(2, 3))
    torch.testing.assert_close(grpo.guard("icepop", d, mask), torch.where((r >= 0.5) & (r <= 5), r, 0.0))
    with pytest.raises(ValueError, match="unknown guard 'hope'; accepted: none, token_tis"):
        grpo.guard("hope", d, mask)
    with pytest.raises(ValueError, match="unknown level 'word'; accepted: token, sequence"):
        grpo.loss(d, d, torch.ones(2), r, mask, level="word")


def test_without_disagreement_every_guard_is_one():
    d, mask = torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool)
    for kind in grpo.GUARDS:
        assert torch.equal(grpo.guard(kind, d, mask), torch.ones(3, 4)), kind


def test_measures_by_hand():
    rollout = torch.log(torch.tensor([[0.5, 0.5], [0.2, 0.9]]))
    ratio = torch.tensor([[1.0, 2.0], [0.5, 7.0]])
    mask = torch.tensor([[True, True], [True, False]])
    got = grpo.disagreement(rollout + ratio.log(), rollout, mask)
    ln2 = math.log(2)
    wanted = {
        "rollout_corr/kl": 0.0,
        "rollout_corr/k3_kl": 0.5 / 3,
        "rollout_corr/chi2_token": 5.25 / 3 - 1,
        "rollout_corr/rollout_is_eff_sample_size": (3.5 / 3) ** 2 / (5.25 / 3),
        "rollout_corr/mean_abs_d": 2 * ln2 / 3,
        "rollout_corr/max_abs_d": ln2,
        "training/rollout_probs_diff_max": 0.5,
    }
    assert got == pytest.approx(wanted, abs=1e-6)
    same = grpo.disagreement(rollout, rollout, mask)
    assert same["rollout_corr/rollout_is_eff_sample_size"] == 1 and same["rollout_corr/max_abs_d"] == 0
    assert grpo.alarms(same) == [] and grpo.alarms(got) == []
    assert len(grpo.alarms({"rollout_corr/kl": -0.2, "rollout_corr/chi2_token": 1.5})) == 2
