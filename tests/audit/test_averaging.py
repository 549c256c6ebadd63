"""err(B) = variance/B + floor: the fit finds both, its intervals hold what they should, and it agrees with the law's
own figures of bias (docs/numerics.md, 8; docs/measured/error.md)."""

import math
import re
from pathlib import Path

import pytest
import torch

from fp4ext import Spec
from fp4ext.audit.averaging import Interval, fit, t_quantile
from fp4ext.audit.operand import measured, observe
from fp4ext.testing import generate

MEASURED = Path(__file__).parents[2] / "docs" / "measured" / "error.md"


def table(heading):
    """{(row, column): number} of the table in docs/measured/error.md that follows a line with `heading`."""
    lines = MEASURED.read_text().split(heading, 1)[1].splitlines()
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    end = next((i for i, row in enumerate(rows) if i > 1 and len(row) != len(rows[0])), len(rows))
    return {(row[0], name): row[i] for row in rows[2:end] for i, name in enumerate(rows[0])}


def synthetic(draws, floor, variance, n=2000, seed=0):
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(n, generator=g, dtype=torch.float64)
    drift = torch.randn(n, generator=g, dtype=torch.float64)
    drift *= (floor * truth.square().sum() / drift.square().sum()).sqrt()
    noise = torch.randn(draws, n, generator=g, dtype=torch.float64) * (variance * truth.square().mean()).sqrt()
    return fit(noise + drift, truth.square().sum().item())


def test_noise_and_drift_are_told_apart():
    law = synthetic(64, floor=1e-4, variance=1e-2)
    assert law.variance == pytest.approx(1e-2, rel=0.02)
    assert law.floor.low < 1e-4 < law.floor.high and law.floor.low > 5e-5
    assert law.drifts and law.ratio.mean == pytest.approx(256 * (1e-2 / 256 + 1e-4) / 1.01e-2, rel=0.3)
    pure = synthetic(64, floor=0.0, variance=1e-2)
    assert pure.floor.low < 0 < pure.floor.high and not pure.drifts
    assert [b for b, _ in law.curve] == [1, 2, 4, 8, 16, 32, 64]
    for b, err in law.curve:
        assert err == pytest.approx(law.err(b), rel=0.25)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Coverage over 400 experiments, at a drift that is there and at one that is not."""
    for floor in (0.0, 2e-4):
        inside = 0
        for seed in range(400):
            law = synthetic(12, floor, 1e-2, n=300, seed=seed)
            inside += law.floor.low <= floor <= law.floor.high
        assert inside >= 0.93 * 400, (floor, inside)


def test_what_is_not_random_is_exact():
    truth = torch.tensor([3.0, 4.0])
    law = fit(torch.tensor([[0.3, 0.4]]), truth.square().sum().item())
    assert law.floor == Interval.exact(law.floor.mean) and law.floor.mean == pytest.approx(0.01)
    assert law.variance == 0 and law.ratio.mean == 256 and law.drifts
    assert fit(torch.zeros(5, 2), 0.0).floor.mean == 0


def test_t_quantiles():
    for freedom, wanted in ((3, 3.182), (5, 2.571), (10, 2.228), (31, 2.040), (1000, 1.962)):
        assert t_quantile(freedom) == pytest.approx(wanted, rel=0.02), freedom
    assert math.isclose(Interval.of(torch.tensor([1.0, 2.0, 3.0])).mean, 2.0)


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("nvfp4/amax/stochastic", "gaussian"),
        ("nvfp4/minvar/stochastic", "outliers30"),
        ("nvfp4/amax/eden/1x16/tensor/128", "gaussian"),
        ("nvfp4/amax/eden/1x16/tensor/128", "outliers30"),
        ("nvfp4/amax/eden/1x16/tensor/128", "outliers100"),
        ("nvfp4/sweep/eden/1x16/tensor/128x2", "outliers30"),
    ],
)
def test_bias_agrees_with_what_256_draws_measured(key, data):
    """The ratio that the law extrapolates from 32 draws, against B·err(mean of B)/err(1) of all 256."""
    _, m = measured([observe(x := generate(data, 64, 512, seed=2), Spec.parse(key), -1, "x", {"x": x})])
    ratio, wanted = m.law.ratio, float(table("B·err(mean of B)/err(1) at B = 256")[key, data])
    slack = 0.1 + 0.1 * wanted
    assert ratio.low - slack <= wanted <= ratio.high + slack, (ratio, wanted)
    assert m.law.drifts == (wanted > 2), (ratio, wanted)


@pytest.mark.parametrize(
    "key",
    ["nvfp4/amax", "nvfp4/sweep", "nvfp4/amax/nearest/16x16", "mxfp8/ceil", "nvfp4/amax/stochastic"]
    + ["nvfp4/sweep/eden/1x16/tensor/128x2"],
)
def test_error_agrees_with_the_law(key):
    _, m = measured(
        [observe(x := generate("gaussian", 256, 1024, seed=1), Spec.parse(key), -1, "x", {"x": x}, draws=4)]
    )
    wanted = table("Relative MSE ×1e3 on N(0, 1)")[key, "must be"]
    assert 1e3 * m.mse == pytest.approx(float(re.sub("–", "nan", wanted)), rel=0.02)
    if Spec.parse(key).needs_rng:
        assert abs(m.misalignment) < 2e-3 and m.signed.low < 1e-3 and m.signed.high > -1e-3
    else:
        assert m.signed.low == m.signed.mean == m.signed.high < 0  # nearest rounding shrinks, exactly
