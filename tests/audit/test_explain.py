"""explain: the arithmetic of rounding, by itself and by the library's own quantizer."""

import pytest
import torch

import fp4ext
from fp4ext import Spec
from fp4ext.audit.explain import E2M1_GRID, block, rounded, running_means


def test_once_and_a_thousand_times():
    r = rounded(3.2, (3.0, 4.0))
    assert (r.low, r.high, r.nearest) == (3.0, 4.0, 3.0) and r.up == pytest.approx(0.2)
    assert abs(r.mean - 3.2) < 4 * r.expected_error < 0.06
    assert sum(r.draws) == 1000 and running_means(r, 1000)[-1] == pytest.approx(r.mean)


@pytest.mark.parametrize("value", [-6.5, -3.2, -0.0, 0.2, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 6.0, 9.0])
def test_it_rounds_as_the_library_does(value):
    """Beside a 6, an NVFP4 block's scale is 1."""
    images = block([value, 6.0], Spec("nvfp4")).images if abs(value) <= 6 else [max(-6.0, min(6.0, value))]
    assert rounded(value).nearest == images[0]


def test_the_grid_is_the_format():
    q = fp4ext.quantize(torch.tensor([[*E2M1_GRID]]))
    assert q.dequantize().flatten().tolist() == list(E2M1_GRID)


def test_points_of_the_grid_never_move():
    for v in E2M1_GRID:
        r = rounded(v)
        assert r.low == r.high == r.nearest == v and r.up == 0 and r.mean == v


def test_blocks():
    b = block([0.1, 0.4, 3.2, 5.9], Spec("nvfp4", "sweep"))
    assert b.error < 0.01 and len(b.images) == 4
    with pytest.raises(ValueError, match="17 numbers; accepted: 1 to 16"):
        block([1.0] * 17, Spec("nvfp4"))
    with pytest.raises(ValueError, match="accepted: one without an rht"):
        block([1.0], Spec("nvfp4", rht=16))
