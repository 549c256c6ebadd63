"""The guards of the arms by hand, and the measures under their names in metrics.jsonl."""

import pytest
import torch

from fp4ext.rl import disagreement
from fp4ext.train.rl import correction

D = torch.log(torch.tensor([[0.4, 1.0, 9.0], [1.2, 1.1, 6.0]]))
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_guards():
    r = D.exp()
    assert torch.equal(correction.weight("none", D, MASK), torch.ones(2, 3))
    torch.testing.assert_close(correction.weight("token_tis", D, MASK), torch.tensor([[0.4, 1, 2], [1.2, 1.1, 2]]))
    # The first product is 3.6 and goes; the second is 1.32, its masked token not counted.
    rejected = correction.weight("sequence_rejection", D, MASK)
    assert torch.equal(rejected, (MASK & torch.tensor([[False], [True]])).float())
    torch.testing.assert_close(correction.weight("icepop", D, MASK), torch.where((r >= 0.5) & (r <= 5), r, 0.0))
    with pytest.raises(ValueError, match="unknown guard 'hope'; accepted: none, token_tis"):
        correction.weight("hope", D, MASK)


def test_without_disagreement_every_guard_is_one():
    d, mask = torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool)
    for guard in correction.GUARDS:
        assert torch.equal(correction.weight(guard, d, mask), torch.ones(3, 4)), guard


def test_measures():
    measured = disagreement(D, torch.zeros(2, 3), MASK)
    got = correction.measures(measured)
    assert got["rollout_corr/max_abs_d"] == measured.max_abs and got["rollout_corr/kl"] == measured.k1
    assert list(got) == list(correction.NAMES.values()) and all(isinstance(v, float) for v in got.values())
