"""The objective against a few lines of torch: advantages, clips, ratios, means, KL; and its gradient."""

import math
from dataclasses import replace

import pytest
import torch

from fp4ext.rl import objective
from fp4ext.rl.objective import Objective, advantages

REWARDS = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1])


def test_advantages():
    a = advantages(REWARDS, 4)
    s = math.sqrt(3) / 4
    torch.testing.assert_close(a[:4], torch.tensor([0.75, -0.25, -0.25, -0.25]) / (s + 1e-6))
    assert (a[4:] == 0).all()
    torch.testing.assert_close(advantages(REWARDS, 4, "group")[:4], torch.tensor([0.75, -0.25, -0.25, -0.25]))
    torch.testing.assert_close(advantages(REWARDS, 4, "leave_one_out")[:4], torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))


def case(seed=0, n=4, t=6):
    """Log-probs before and after a step, advantages of both signs, and sequences of 6 to 3 tokens."""
    torch.manual_seed(seed)
    old = -torch.rand(n, t) * 2
    mask = torch.arange(t)[None] < torch.arange(t, t - n, -1)[:, None]
    return old + torch.randn(n, t) * 0.4, old, torch.randn(n), mask


def by_hand(o, logprobs, old, advantage, mask, weight=None, reference=None):
    """A loop over tokens in fp64, from the papers' equations."""
    total, per_sequence = 0.0, []
    for i in range(len(advantage)):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        logs = [(logprobs[i, t] - old[i, t]).double() for t in tokens]
        if o.ratio == "sequence":
            logs = [sum(logs) / len(tokens)] * len(tokens)
        own = 0.0
        for t, log in zip(tokens, logs, strict=True):
            rho, a = log.exp(), advantage[i].double()
            term = min(rho * a, max(min(rho, 1 + o.high), 1 - o.low) * a)
            if o.dual is not None and a < 0:
                term = max(term, o.dual * a)
            each = -term * (1.0 if weight is None else weight[i, t].double())
            if reference is not None:
                d = (reference[i, t] - logprobs[i, t]).double()
                each = each + o.kl_coef * {"k1": -d, "k2": d * d / 2, "k3": d.exp() - 1 - d}[o.kl]
            own = own + each
        total = total + own
        per_sequence.append(own / (o.length if o.mean == "constant" else len(tokens)))
    return total / mask.sum() if o.mean == "token" else sum(per_sequence) / len(per_sequence)


FORMS = {
    "ppo": Objective(),
    "clip-higher": Objective(low=0.2, high=0.28),
    "dual clip": Objective(dual=1.5),
    "grpo": Objective(mean="sequence", kl_coef=0.04),
    "dr.grpo": Objective(mean="constant", length=8),
    "gspo": Objective(low=3e-2, high=4e-2, ratio="sequence", mean="sequence"),
    "k1": Objective(kl="k1", kl_coef=0.5),
    "k2": Objective(kl="k2", kl_coef=0.5),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_by_hand(name):
    for seed in range(5):
        logprobs, old, advantage, mask = case(seed)
        weight, reference = torch.rand(4, 6), old - 0.3
        got, _ = FORMS[name].loss(logprobs, old, advantage, mask, weight, reference)
        wanted = by_hand(FORMS[name], logprobs, old, advantage, mask, weight, reference)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


def test_on_policy_the_gradient_is_the_policy_gradient():
    """Ratio 1, nothing clipped: dL/dlogπ = −w·A / tokens, 0 where the mask is."""
    _, old, advantage, mask = case()
    for mean, share in (("token", 1 / mask.sum()), ("sequence", 1 / mask.sum(1, keepdim=True) / 4)):
        logprobs = old.clone().requires_grad_()
        loss, clipped = Objective(mean=mean).loss(logprobs, old, advantage, mask, torch.full((4, 6), 0.5))
        loss.backward()
        torch.testing.assert_close(logprobs.grad, -0.5 * advantage[:, None] * mask * share)
        assert clipped == 0


def test_clipping():
    """Beyond the clip a token that moves the way its advantage wants has no gradient; one that moves against it has."""
    old = torch.log(torch.tensor([[0.5, 0.2, 0.9], [0.1, 0.4, 0.3]]))
    mask = torch.tensor([[True, True, False], [True, True, True]])
    moved = (old + torch.log(torch.tensor([[1.5, 0.5, 9.0], [1.5, 0.5, 1.0]]))).requires_grad_()
    loss, clipped = Objective().loss(moved, old, torch.tensor([1.0, -2.0]), mask)
    # A = 1: min(1.5, 1.2), min(0.5, 0.8); A = −2: min(−3, −2.4), min(−1, −1.6), −2
    torch.testing.assert_close(loss, torch.tensor(-(1.2 + 0.5 - 3 - 1.6 - 2) / 5))
    loss.backward()
    zero = torch.tensor([[True, False, True], [False, True, False]])
    assert torch.equal(moved.grad == 0, zero) and clipped == 2 / 5


def test_dual_clip_bounds_what_one_token_costs():
    old = torch.zeros(1, 1)
    moved = torch.full((1, 1), 5.0, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, _ = Objective(dual=3.0).loss(moved, old, torch.tensor([-1.0]), mask)
    loss.backward()
    assert loss == 3 and moved.grad == 0
    assert Objective().loss(moved, old, torch.tensor([-1.0]), mask)[0].item() == pytest.approx(math.exp(5))


def test_a_sequence_without_tokens_does_not_count():
    logprobs, old, advantage, mask = case()
    mask[1] = False
    rest = torch.tensor([0, 2, 3])
    for o in (FORMS["grpo"], FORMS["ppo"], FORMS["gspo"]):
        got, _ = o.loss(logprobs, old, advantage, mask)
        wanted, _ = o.loss(logprobs[rest], old[rest], advantage[rest], mask[rest])
        torch.testing.assert_close(got, wanted)


def test_overlong():
    mask = torch.ones(3, 4, dtype=torch.bool)
    finished = torch.tensor([True, False, True])
    assert torch.equal(objective.overlong_mask(mask, finished).sum(1), torch.tensor([4, 0, 4]))
    penalty = objective.overlong_penalty(torch.tensor([10, 16, 18, 20, 25]), most=20, soft=4)
    torch.testing.assert_close(penalty, torch.tensor([0.0, 0, -0.5, -1, -1]))


def test_kl_estimators_agree_on_average():
    """Over all 6 outcomes, weighted by π: k1 and k3 are the KL; k2 is near it where policies are near."""
    torch.manual_seed(3)
    p, q = torch.randn(6).double().log_softmax(0), torch.randn(6).double().log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * objective.kl(p, q, kind)).sum(), exact)
    near = (0.99 * p + 0.01 * q).log_softmax(0)
    k2 = (p.exp() * objective.kl(p, near, "k2")).sum()
    assert k2 == pytest.approx((p.exp() * (p - near)).sum().item(), rel=0.05)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: advantages(REWARDS, 4, "best"), "unknown baseline 'best'; accepted: group, group_std, leave_one_out"),
        (lambda: advantages(REWARDS, 3), "8 rewards in groups of 3; accepted: whole groups"),
        (lambda: advantages(REWARDS, 1, "leave_one_out"), "groups of 1; accepted: groups of 2 or more"),
        (lambda: objective.overlong_penalty(REWARDS, 4, 5), "soft is 5; accepted: from 1 to most, 4"),
        (lambda: objective.kl(REWARDS, REWARDS, "k4"), "unknown KL 'k4'; accepted: k1, k2, k3"),
        (lambda: Objective(mean="word"), "unknown mean 'word'; accepted: token, sequence, constant"),
        (lambda: Objective(ratio="word"), "unknown ratio 'word'"),
        (lambda: Objective(low=2), "low is 2, high 0.2; accepted: low from 0 to 1"),
        (lambda: Objective(dual=1.0), "dual is 1.0; accepted: above 1, or None"),
        (lambda: Objective(mean="constant"), "length None; accepted: a length with 'constant' alone"),
        (lambda: replace(Objective(), length=3), "length 3; accepted: a length with 'constant' alone"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
