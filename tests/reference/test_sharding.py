"""docs/numerics.md, 5: bits depend on logical coordinates alone: shards given the shared A and
their place equal the whole."""

import pytest
import torch

from fp4ext.policy.spec import Spec
from fp4ext.reference import amax_of, quantize

from .data import gaussian, raw, same

SEED, OFFSET = 77, 5
RNG = torch.tensor([SEED, OFFSET])
KEYS = [
    "nvfp4/amax",
    "nvfp4/four_over_six/nearest/16x16",
    "nvfp4/sweep/nearest/1x16/pow2",
    "nvfp4/amax/stochastic",
    "nvfp4/minvar/stochastic/16x16",
    "nvfp4/amax/nearest/1x16/tensor/64",
    "nvfp4/minvar/stochastic/1x16/tensor/32x2",
    "nvfp4/amax/eden/1x16/tensor/128",
    "nvfp4/sweep/eden/1x16/pow2/64x2",
    "mxfp8/ceil/stochastic",
    "mxfp4/ceil/stochastic/1x32/none/128",
    "mxfp8_e5m2",
]


def place(row, k):
    return torch.tensor([SEED, OFFSET, row, k])


@pytest.fixture
def x():
    """Shards whose amaxes differ tenfold."""
    gains = torch.tensor([1.0, 10.0])
    return gaussian(256, 512) * gains.repeat_interleave(128)[:, None] * gains.flip(0).repeat_interleave(256)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("cut", ["rows of x", "columns of x"])
def test_shards_equal_the_whole(x, cut, axis, key):
    whole = quantize(x, key, axis, RNG, "dy")
    amax = amax_of(x, key, axis, RNG) if Spec.parse(key).fmt.has_global_scale else None
    dim = 0 if cut == "rows of x" else 1
    along_k = (dim == 1) == (axis == -1)
    size = x.shape[dim] // 2
    parts = [
        quantize(shard, key, axis, place(0, i * size) if along_k else place(i * size, 0), "dy", amax)
        for i, shard in enumerate(x.split(size, dim))
    ]
    out_dim = -1 if along_k else -2
    joined = [torch.cat([raw(p[i]) for p in parts], out_dim).view(whole[i].dtype) for i in (0, 1)]
    assert same((*joined, parts[0][2]), whole)


@pytest.mark.parametrize("key", ["nvfp4/amax/stochastic", "nvfp4/sweep/eden/1x16/tensor/128", "mxfp8/ceil/stochastic"])
def test_without_their_place_they_do_not(x, key):
    whole = quantize(x, key, -1, RNG)
    second = quantize(x[128:], key, -1, place(0, 0), amax=amax_of(x, key, -1, RNG))
    assert not torch.equal(raw(second[0])[:, :], raw(whole[0])[128:]) or not torch.equal(
        raw(second[1]), raw(whole[1])[128:]
    )


@pytest.mark.parametrize("axis", [-1, -2])
def test_without_the_shared_amax_they_do_not(x, axis):
    assert not torch.equal(quantize(x[:128], "nvfp4", axis)[2], quantize(x, "nvfp4", axis)[2])


@pytest.mark.parametrize("axis", [-1, -2])
def test_experts_count_rows_through_the_stack(axis):
    x = gaussian(4, 32, 64)
    key = "nvfp4/amax/stochastic/1x16/expert"
    whole = quantize(x, key, axis, RNG)
    rows = x.shape[-2] if axis == -1 else x.shape[-1]
    shard = quantize(x[2:], key, axis, place(2 * rows, 0))
    assert torch.equal(shard[0], whole[0][2:]) and torch.equal(shard[2], whole[2][2:])


@pytest.mark.parametrize("outer", ["tensor", "row", "expert"])
def test_given_amax_has_the_shape_of_global_scale(outer):
    x = gaussian(3, 16, 64)
    key = f"nvfp4/sweep/nearest/1x16/{outer}"
    a = amax_of(x, key)
    want = quantize(x, key)
    assert a.shape == want[2].shape
    assert same(quantize(x, key, amax=a), want)
    assert not same(quantize(x, key, amax=2 * a), want)
