"""docs/numerics.md, 6."""

import pytest
import torch

from fp4ext.reference import effective_n, inverse_rht, philox4x32, quantize, rht, signs, unpack_nibbles

from .data import gaussian, student_t3, wide

RNG = torch.tensor([11, 22])


def sylvester(n):
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def half_turns(n, degrees):
    """Block diagonal: each pair (2j, 2j+1) reflected at an angle of `degrees`, a number or one a pair."""
    angle = torch.deg2rad(torch.as_tensor(degrees, dtype=torch.float64).expand(n // 2))
    c, s = angle.cos(), angle.sin()
    return torch.block_diag(*torch.stack((torch.stack((c, s), -1), torch.stack((s, -c), -1)), -2))


def turns(n):
    """What the second stage puts in the place of the butterflies of h = 1 (which are half_turns of 45 degrees)."""
    return half_turns(n, 20 + 6 * (torch.arange(n // 2) % 8).double())


@pytest.mark.parametrize("n", [16, 32, 64, 128])
@pytest.mark.parametrize("stages", [1, 2])
def test_is_h_d_over_root_n(n, stages):
    x = gaussian(3, 2 * n)
    want = x.double().unflatten(-1, (-1, n))
    for stage, negate in enumerate(signs(RNG, n, stages)):
        matrix = sylvester(n) if stage == 0 else sylvester(n) @ half_turns(n, 45) @ turns(n)
        want = torch.where(negate, -want, want) @ matrix.mT / n**0.5
    got = rht(x, n, stages, RNG)
    assert torch.allclose(got.double(), want.flatten(-2), rtol=0, atol=1e-5)
    assert torch.allclose(inverse_rht(got.double(), n, stages, RNG), x.double(), rtol=0, atol=1e-5)


# The one sign vector that TransformerEngine uses for every wgrad, and the rng that draws it here.
TRANSFORMER_ENGINE = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], torch.tensor([12345, 13221])


def test_transformer_engine_s_rotation():
    """x·(D·H/4) with its signs, rounded to BF16 as it stores rotated values: 0 differ from ours, rounded likewise."""
    vector, rng = TRANSFORMER_ENGINE
    assert torch.equal(signs(rng, 16, 1)[0], torch.tensor(vector) == -1)
    x = torch.cat([gaussian(2048, 64), student_t3(2048, 64)]).bfloat16()
    theirs = x.double().unflatten(-1, (-1, 16)) @ (torch.tensor(vector).double()[:, None] * sylvester(16) / 4)
    ours = rht(x, 16, 1, rng)
    assert torch.equal(ours.bfloat16(), theirs.float().flatten(-2).bfloat16())
    assert not torch.equal(rht(x, 16, 1, rng + 1).bfloat16(), ours.bfloat16())


def test_what_rounding_rotated_values_to_bf16_changes():
    """The recipe of TransformerEngine does so and fp4ext does not: 0.6 % of the codes differ on N(0, 1)."""
    x, rng = gaussian(1024, 256).bfloat16(), TRANSFORMER_ENGINE[1]
    ours = quantize(x, "nvfp4/amax/nearest/1x16/tensor/16", rng=rng)
    theirs = quantize(rht(x, 16, 1, rng).bfloat16(), "nvfp4/amax")
    differ = (unpack_nibbles(ours[0]) != unpack_nibbles(theirs[0])).double().mean().item()
    assert 0.004 < differ < 0.008


def test_order_of_the_butterflies():
    """Scalar butterflies, in fp32, on data whose spread makes the order visible."""
    n, x = 32, wide(1, 32, seed=3)
    v = [f for f in torch.where(signs(RNG, n, 1)[0], -x[0], x[0])]
    h = 1
    while h < n:
        for i in range(n):
            if not i & h:
                v[i], v[i + h] = v[i] + v[i + h], v[i] - v[i + h]
        h *= 2
    scale = torch.tensor(1 / 32**0.5)
    want = torch.stack([f * scale for f in v])
    assert torch.equal(rht(x, n, 1, RNG)[0], want)
    other = x.double() * 1  # another order (matrix product) differs in fp32 bits somewhere: the test can see it
    assert not torch.equal((torch.where(signs(RNG, n, 1)[0], -other, other) @ sylvester(n)).float()[0] * scale, want)


def test_signs_come_from_their_bits():
    for stage in (0, 1):
        words = [int(w) for w in philox4x32((stage, 0, 2, 22), 11)]
        assert signs(RNG, 128, 2)[stage].tolist() == [bool(words[i // 32] >> (i % 32) & 1) for i in range(128)]
    assert torch.equal(signs(RNG, 16, 1)[0], signs(RNG, 128, 1)[0, :16])
    assert not torch.equal(signs(torch.tensor([11, 23]), 128, 1), signs(RNG, 128, 1))


@pytest.mark.parametrize(
    "n,k,want",
    [
        (128, 256, 128),
        (128, 192, 64),
        (128, 96, 32),
        (128, 48, 16),
        (32, 96, 32),
        (64, 96, 32),
        (128, 40, 16),
        (128, 120, 128),
        (16, 7, 16),
        (128, 1, 16),
    ],
)
def test_effective_n(n, k, want):
    assert effective_n(n, k) == want


def test_pads_to_16():
    x = gaussian(2, 40)
    padded = torch.cat([x, torch.zeros(2, 8)], 1)
    assert torch.equal(rht(x, 128, 1, RNG), rht(padded, 16, 1, RNG))


def test_nan_inf_and_overflow_take_their_vector_only():
    x = gaussian(2, 128)
    x[0, 3] = torch.nan
    x[0, 40] = -torch.inf
    x[1, 64:80] = 3e38
    r = rht(x, 16, 1, RNG)
    bad = r.unflatten(-1, (8, 16)).isnan()
    assert torch.equal(bad.any(-1), bad.all(-1))
    assert bad.any(-1).nonzero().tolist() == [[0, 0], [0, 2], [1, 4]]


def test_partial_overflow_takes_its_whole_vector():
    """Two equal entries 8 apart: half of their sums overflow, half cancel."""
    x = torch.zeros(1, 32)
    x[0, [0, 8, 20]] = 3e38
    x = torch.where(signs(RNG, 16, 1)[0].repeat(2), -x, x)
    r = rht(x, 16, 1, RNG)
    assert r[0, :16].isnan().all() and r[0, 16:].isfinite().all()


def test_cancels_in_a_product():
    x, w = gaussian(4, 256).double(), gaussian(5, 256, seed=1).double()
    rx, rw = (rht(t.float(), 128, 2, RNG).double() for t in (x, w))
    assert torch.allclose(rx @ rw.T, x @ w.T, rtol=0, atol=1e-4)
