"""Attention on the SIMT machine: the bytes of the CPU's op, whatever stands around a row."""

import pytest
import torch

from fp4ext.testing import assert_bytes_equal, generate


def qkv(batch, heads, groups, m, t, d, seed=0, dtype=torch.float32, kv_dtype=None, kind="gaussian"):
    def make(i, dtype, *shape):
        return generate(kind, *shape, seed=seed + i, dtype=dtype)

    kv = batch, groups, t, d
    return make(0, dtype, batch, heads, m, d), make(1, kv_dtype or dtype, *kv), make(2, kv_dtype or dtype, *kv)


def check(simt, q, k, v, start=None, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    y = simt.ops.run_attention(q, k, v, start, scale)
    wanted = torch.ops.fp4ext.attention(q, k, v, start, scale)
    assert_bytes_equal(y, wanted, f"{tuple(q.shape)} over {tuple(k.shape)}")
    return y


@pytest.mark.parametrize(
    "batch, heads, groups, m, t, d",
    [
        (1, 1, 1, 1, 1, 1),
        (2, 4, 2, 1, 300, 40),  # a decode over two chunks
        (2, 4, 2, 7, 19, 20),
        (1, 3, 1, 6, 530, 33),  # tiles of 8 rows, three of them
        (1, 2, 1, 40, 290, 70),  # tiles of 64, a ragged one; d beyond a tile of columns
        (2, 1, 1, 3, 9, 140),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_cpu(simt, batch, heads, groups, m, t, d, dtype):
    check(simt, *qkv(batch, heads, groups, m, t, d, dtype=dtype))


@pytest.mark.parametrize("dtype, kv_dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_a_cache_of_another_dtype_and_ragged_starts(simt, dtype, kv_dtype):
    check(simt, *qkv(3, 4, 2, 9, 290, 16, dtype=dtype, kv_dtype=kv_dtype), torch.tensor([0, 281, 250]))


@pytest.mark.parametrize("kind", ["outliers100", "wide", "tiny", "zeros", "integers", "nonfinite"])
def test_hard_numbers(simt, kind):
    """Scores that cancel, weights that vanish, sums of subnormals, NaN and ∞ in queries, keys and values."""
    check(simt, *qkv(1, 2, 1, 9, 40, 16, seed=5, kind=kind))
    check(simt, *qkv(1, 2, 1, 33, 40, 16, seed=6, kind=kind), scale=30.0)


def test_infinite_scores(simt):
    """A row whose scores are all −∞ is NaN, a single −∞ has weight 0, +∞ is NaN; a −∞ stands for no NaN."""
    q, k, v = torch.ones(1, 1, 4, 1), torch.ones(1, 1, 4, 1), torch.arange(4.0).view(1, 1, 4, 1)
    k[0, 0, :, 0] = torch.tensor([-torch.inf, 1.0, torch.nan, torch.inf])
    y = check(simt, q, k, v)
    assert y[0, 0, 0].isnan() and y[0, 0, 1] == 1 and y[0, 0, 2:].isnan().all()


def test_underflow_keeps_the_sign_of_what_is_read_alone(simt):
    """The −0 that a tiny product leaves is not made +0 by a key that the row does not read."""
    q, k, v = (torch.zeros(1, 1, 3, 2) for _ in range(3))
    q[..., 0], k[0, 0, 0, 0], v[0, 0, 1] = 1.0, 9.0, -1e-45
    y = check(simt, q, k, v, scale=1.0)
    assert y[0, 0, 1].signbit().all() and not y[0, 0, 1].any()


@pytest.mark.parametrize("schedule", range(3))
def test_a_decode_row_equals_a_prefill_row(simt, schedule):
    """Token by token (tiles of 8 rows), garbage past the end of the cache: the rows of a prefill (tiles of 64)."""
    q, k, v = qkv(2, 4, 2, 262, 262, 12, seed=7, dtype=torch.bfloat16)
    whole = torch.ops.fp4ext.attention(q, k, v, None, 0.3)
    simt.configure(seed=schedule, asynchronous=simt.MODES[schedule])
    assert_bytes_equal(simt.ops.run_attention(q, k, v, None, 0.3), whole, "prefill")
    cache_k, cache_v = (torch.full((2, 2, 270, 12), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    for i in (0, 1, 17, 255, 256, 261):
        cache_k[:, :, : i + 1], cache_v[:, :, : i + 1] = k[:, :, : i + 1], v[:, :, : i + 1]
        y = simt.ops.run_attention(q[:, :, i : i + 1], cache_k, cache_v, torch.full((2,), i), 0.3)
        assert_bytes_equal(y, whole[:, :, i : i + 1], f"token {i}")


def test_views_of_any_stride(simt):
    """A cache laid out [batch, t, heads, d], queries cut from a wider tensor, addresses that are aligned to nothing."""
    q, k, v = qkv(2, 4, 2, 5, 33, 10, seed=8, dtype=torch.bfloat16)
    wide = generate("gaussian", 2, 5, 4, 31, seed=9, dtype=torch.bfloat16)
    wide[..., 7:17] = q.transpose(1, 2)
    k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    y = simt.ops.run_attention(wide[..., 7:17].transpose(1, 2), k, v, None, 0.5)
    assert_bytes_equal(y, torch.ops.fp4ext.attention(q, k.contiguous(), v.contiguous(), None, 0.5), "views")


@pytest.mark.parametrize("m, budget", [(50, 1), (50, 130_000), (2, 1)], ids=str)
def test_in_turns(simt, m, budget):
    """A workspace for one tile of rows, or two: the same bytes, one band after the other."""
    q, k, v = qkv(2, 4, 2, m, 90, 8, seed=11)
    y = simt.ops.run_attention(q, k, v, None, 0.5, budget)
    assert_bytes_equal(y, torch.ops.fp4ext.attention(q, k, v, None, 0.5), f"budget {budget}")


def test_starts_that_lie_do_no_harm(simt):
    """They are read on the device, where nothing can raise: clamped to the keys there are."""
    q, k, v = qkv(3, 2, 1, 4, 20, 8, seed=10)
    y = simt.ops.run_attention(q, k, v, torch.tensor([-5, 2**40, 3]), 0.5)
    assert_bytes_equal(y, torch.ops.fp4ext.attention(q, k, v, torch.tensor([0, 16, 3]), 0.5), "clamped")


@pytest.mark.parametrize("batch, heads, groups, m, t, d", [(0, 2, 1, 3, 4, 8), (1, 0, 0, 3, 4, 8), (1, 2, 1, 0, 4, 8)])
def test_empty(simt, batch, heads, groups, m, t, d):
    q, k, v = torch.ones(batch, heads, m, d), torch.ones(batch, groups, t, d), torch.ones(batch, groups, t, d)
    assert simt.ops.run_attention(q, k, v, None, 1.0).shape == q.shape
