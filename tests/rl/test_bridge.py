"""Measures of disagreement by hand, alarms, and the weights that correct for it."""

import math

import pytest
import torch

from fp4ext.rl import bridge

LN2 = math.log(2)
ROLLOUT = torch.log(torch.tensor([[0.5, 0.5], [0.2, 0.9]]))
RATIO = torch.tensor([[1.0, 2.0], [0.5, 7.0]])
MASK = torch.tensor([[True, True], [True, False]])
D = torch.log(torch.tensor([[0.4, 1.0, 3.0], [1.2, 1.1, 6.0]]))
D_MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_measures_by_hand():
    got = bridge.disagreement(ROLLOUT + RATIO.log(), ROLLOUT, MASK)
    assert got.k1 == pytest.approx(0.0, abs=1e-7) and got.k3 == pytest.approx(0.5 / 3)
    assert got.chi2 == pytest.approx(5.25 / 3 - 1) and got.ess == pytest.approx((3.5 / 3) ** 2 / (5.25 / 3))
    assert got.mean_abs == pytest.approx(2 * LN2 / 3) and got.max_abs == pytest.approx(LN2)
    assert got.max_probability == pytest.approx(0.5)
    assert got.sequence_chi2 == pytest.approx((2**2 + 0.5**2) / 2 - 1)
    assert got.sequence_ess == pytest.approx((2.5 / 2) ** 2 / (4.25 / 2))
    torch.testing.assert_close(got.per_sequence, torch.tensor([LN2 / 2, LN2]).double())
    assert got.per_expert is None and bridge.guard(got) == []


def test_by_expert():
    """Token (0, 0) went to experts 0 and 1, (0, 1) to 1 and 3, (1, 0) to 3 and 0; nobody chose 2."""
    expert = torch.tensor([[[0, 1], [1, 3]], [[3, 0], [2, 2]]])
    got = bridge.disagreement(ROLLOUT + RATIO.log(), ROLLOUT, MASK, expert).per_expert
    torch.testing.assert_close(got[[0, 1, 3]], torch.tensor([LN2 / 2, LN2 / 2, LN2]).double())
    assert got[2].isnan()
    one = bridge.disagreement(ROLLOUT + RATIO.log(), ROLLOUT, MASK, expert[..., 0], experts=5).per_expert
    torch.testing.assert_close(one[[0, 1, 3]], torch.tensor([0.0, LN2, LN2]).double())
    assert len(one) == 5


def test_what_is_masked_does_not_matter():
    wild = ROLLOUT.clone()
    wild[1, 1] = math.inf
    got, wanted = (bridge.disagreement(t + RATIO.log(), t, MASK) for t in (wild, ROLLOUT))
    assert {k: v for k, v in vars(got).items() if isinstance(v, float)} == {
        k: v for k, v in vars(wanted).items() if isinstance(v, float)
    }


def test_without_disagreement_nothing_is_corrected():
    d, mask = torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool)
    same = bridge.disagreement(d, d, mask)
    assert same.ess == same.sequence_ess == 1 and same.max_abs == same.chi2 == 0 and bridge.guard(same) == []
    for level in bridge.LEVELS:
        for of in (bridge.truncated, bridge.masked):
            assert (of(d, mask, level=level) == 1).all()
        assert torch.equal(bridge.accepted(d, mask, level=level), mask)


def test_alarms():
    bad = bridge.disagreement(ROLLOUT, ROLLOUT + RATIO.log() * 8, MASK)
    said = bridge.guard(bad)
    assert any(line.startswith("|k1| is ") for line in said) is False  # d cancels in the mean
    assert any(line.startswith("chi2 is ") or line.startswith("|chi2| is ") for line in said)
    assert any(
        line.startswith("ess is ") and line.endswith(", below 0.9") for line in bridge.guard(bad, {}, {"ess": 0.9})
    )
    assert bridge.guard(bad, {"max_abs": 100.0}, {}) == []
    with pytest.raises(ValueError, match="unknown measure 'kl'; accepted: k1, k3, mean_abs"):
        bridge.guard(bad, {"kl": 1.0})


def test_weights():
    r = D.exp()
    torch.testing.assert_close(bridge.truncated(D, D_MASK), torch.tensor([[0.4, 1, 2], [1.2, 1.1, 2]]))
    torch.testing.assert_close(bridge.masked(D, D_MASK), torch.where((r >= 0.5) & (r <= 5), r, 0.0))
    torch.testing.assert_close(bridge.truncated(D, D_MASK, 1.25, "sequence"), torch.tensor([[1.2], [1.25]]))
    torch.testing.assert_close(
        bridge.truncated(D, D_MASK, 9, "geometric"), torch.tensor([[1.2 ** (1 / 3)], [1.32**0.5]])
    )


def test_accepted():
    """Products 1.2 and 1.32, the masked 6 not counted: both stay. With 3 → 9 the first is 3.6 and goes."""
    assert torch.equal(bridge.accepted(D, D_MASK), D_MASK)
    tripled = D + torch.log(torch.tensor([[1.0, 1, 3], [1, 1, 1]]))
    assert torch.equal(bridge.accepted(tripled, D_MASK), D_MASK & torch.tensor([[False], [True]]))
    band = bridge.accepted(D, D_MASK, 0.5, 2.0, "token")
    assert torch.equal(band, torch.tensor([[False, True, False], [True, True, False]]))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: bridge.ratio(D, D_MASK, "word"), "unknown level 'word'; accepted: token, sequence, geometric"),
        (lambda: bridge.disagreement(D, D[:1], D_MASK), r"shapes \(2, 3\), \(1, 3\), \(2, 3\); accepted: one shape"),
        (lambda: bridge.disagreement(D, D, D_MASK & False), "the mask has no token"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
