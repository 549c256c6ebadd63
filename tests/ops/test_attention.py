"""attention, the op: equal to the reference byte for byte on every path, and to a row alone in any company."""

import math
import tempfile

import pytest
import torch
import torch.nn.functional as F

from fp4ext import reference
from fp4ext.functional import ops
from fp4ext.reference.invariant_attention import exp2
from fp4ext.testing import assert_bytes_equal, generate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def qkv(batch, heads, groups, m, t, d, seed=0, dtype=torch.float32, kv_dtype=None, kind="gaussian"):
    make = lambda s, dt, *shape: generate(kind, *shape, seed=seed + s, dtype=dt)  # noqa: E731
    kv_dtype = kv_dtype or dtype
    return (
        make(0, dtype, batch, heads, m, d),
        make(1, kv_dtype, batch, groups, t, d),
        make(2, kv_dtype, batch, groups, t, d),
    )


def attention(q, k, v, start=None, scale=None):
    return ops.attention(q, k, v, start, q.shape[-1] ** -0.5 if scale is None else scale)


def check(each_isa, q, k, v, start=None, scale=None):
    wanted = reference.attention(q, k, v, start, scale)
    for isa, y in each_isa(lambda: attention(q, k, v, start, scale)):
        assert_bytes_equal(y, wanted, f"{isa} {tuple(q.shape)} over {tuple(k.shape)}")
    return wanted


# ---- the order of the numerics contract ----


@pytest.mark.parametrize(
    "batch, heads, groups, m, t, d",
    [(1, 1, 1, 1, 1, 1), (2, 2, 2, 5, 5, 8), (1, 4, 2, 7, 19, 20), (2, 3, 1, 11, 33, 32), (1, 2, 2, 3, 300, 24)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(each_isa, batch, heads, groups, m, t, d, dtype):
    check(each_isa, *qkv(batch, heads, groups, m, t, d, dtype=dtype))


def test_equals_the_reference_beyond_a_block_of_rows_and_two_chunks(each_isa):
    check(each_isa, *qkv(1, 2, 1, 17, 530, 3, seed=3))


@pytest.mark.parametrize("dtype, kv_dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_cache_of_another_dtype(each_isa, dtype, kv_dtype):
    check(each_isa, *qkv(2, 4, 2, 3, 21, 16, dtype=dtype, kv_dtype=kv_dtype), torch.tensor([0, 18]))


@pytest.mark.parametrize("kind", ["outliers100", "wide", "tiny", "zeros", "integers"])
def test_hard_numbers(each_isa, kind):
    """Scores that cancel, weights that vanish, sums of subnormals."""
    check(each_isa, *qkv(1, 2, 1, 9, 40, 16, seed=5, kind=kind))
    check(each_isa, *qkv(1, 2, 1, 9, 40, 16, seed=6, kind=kind), scale=30.0)


def test_exp2_over_its_range():
    """Within 1.5·2^-23 of 2^t down to -126, exactly 1 at 0, 0 below; NaN stays."""
    t = -torch.cat([torch.linspace(0, 126, 400_001), torch.rand(400_000, generator=torch.Generator().manual_seed(0))])
    exact = torch.exp2(t.double())
    assert ((exp2(t).double() - exact).abs() <= 1.5 * 2**-23 * exact).all()
    ends = exp2(torch.tensor([0.0, -0.0, -126.0, math.nextafter(-126, -200) - 1e-5, -1e30, -torch.inf, torch.nan]))
    assert ends[:6].tolist() == [1, 1, 2.0**-126, 0, 0, 0] and ends[6].isnan()


# ---- what must not matter ----


@pytest.mark.parametrize("heads, groups, d", [(4, 4, 32), (6, 2, 20)])
def test_whole_equals_token_by_token(each_isa, heads, groups, d):
    """A prefill, a prefill in pieces and a decode through a cache with garbage past its end."""
    q, k, v = qkv(3, heads, groups, 290, 290, d, seed=7)
    for isa, whole in each_isa(lambda: attention(q, k, v)):
        cache_k, cache_v = (torch.full((3, groups, 320, d), torch.nan) for _ in range(2))
        for begin, end in [(0, 3), (3, 4), (4, 41), (41, 258), *((i, i + 1) for i in range(258, 290))]:
            cache_k[:, :, begin:end], cache_v[:, :, begin:end] = k[:, :, begin:end], v[:, :, begin:end]
            y = attention(q[:, :, begin:end], cache_k, cache_v, torch.full((3,), begin))
            assert_bytes_equal(y, whole[:, :, begin:end], f"{isa} {begin}:{end}")


def test_batch_mates_do_not_matter(each_isa):
    """Ragged positions: each sequence alone gives the bits that it has in company, in any order."""
    q, k, v = qkv(5, 4, 2, 6, 70, 32, seed=8)
    start = torch.tensor([0, 64, 17, 33, 5])
    for isa, y in each_isa(lambda: attention(q, k, v, start)):
        for some in ([2], [4, 0], [1, 1, 3], [4, 3, 2, 1, 0]):
            assert_bytes_equal(attention(q[some], k[some], v[some], start[some]), y[some], f"{isa} {some}")
        one = attention(q[2:3, :, 3:4], k[2:3, :, :21], v[2:3, :, :21])
        assert_bytes_equal(one, y[2:3, :, 3:4], f"{isa}: a query alone")


def test_heads_and_groups_do_not_matter(each_isa):
    q, k, v = qkv(1, 6, 2, 40, 40, 16, seed=9)
    for isa, y in each_isa(lambda: attention(q, k, v)):
        spread = attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))
        assert_bytes_equal(spread, y, f"{isa}: kv heads repeated")
        assert_bytes_equal(attention(q[:, 4:5], k[:, 1:], v[:, 1:]), y[:, 4:5], f"{isa}: a head alone")


def test_threads(each_isa):
    q, k, v = qkv(4, 4, 4, 130, 130, 32, seed=10)
    torch.set_num_threads(1)
    alone = attention(q, k, v)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for isa, y in each_isa(lambda: attention(q, k, v)):
            assert_bytes_equal(y, alone, f"{threads} threads, {isa}")


def test_views_of_any_stride():
    """As a model hands them over, sliced from a cache, and with a last axis that is not contiguous."""
    packed = generate("gaussian", 2, 12, 3, 4, 16)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    wanted = attention(*(t.contiguous() for t in (q, k, v)))
    assert_bytes_equal(attention(q, k, v), wanted)
    turned = [t.mT.contiguous().mT for t in (q, k, v)]
    assert turned[0].stride(-1) != 1
    assert_bytes_equal(attention(*turned), wanted)
    assert_bytes_equal(
        attention(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), torch.zeros(2, dtype=torch.int64)), wanted
    )


# ---- what it is ----


@pytest.mark.parametrize("kind", ["gaussian", "outliers30", "wide"])
@pytest.mark.parametrize("m, t, d", [(1, 1, 8), (40, 40, 32), (3, 2000, 64)])
def test_within_its_bound_of_fp64(kind, m, t, d):
    q, k, v = qkv(1, 2, 2, m, t, d, seed=11, kind=kind)
    if kind != "gaussian":
        q = q * (0.02 / q.abs().amax(-1, keepdim=True))  # e is to stay below 0.1
    mask = torch.arange(t) <= torch.arange(t - m, t)[:, None]
    exact = lambda values: F.scaled_dot_product_attention(q.double(), k.double(), values, mask)  # noqa: E731
    e = (d + 4) * 2**-24 * d**-0.5 * (q.double().abs() @ k.double().abs().mT).amax(-1, keepdim=True)
    assert e.max() <= 0.1
    bound = (4 * e + (min(t, 256) + t / 128 + 32) * 2**-24) * exact(v.double().abs())
    assert ((attention(q, k, v).double() - exact(v.double())).abs() <= bound).all()


def test_weights_and_values_that_are_exact():
    """Equal scores and a power of two of keys: the mean of integers, to the bit."""
    v = torch.randint(-1000, 1000, (1, 1, 512, 8), generator=torch.Generator().manual_seed(0)).float()
    y = attention(torch.zeros(1, 1, 1, 8), torch.randn(1, 1, 512, 8), v)
    assert torch.equal(y[0, 0, 0], v[0, 0].mean(0))


# ---- not a number ----


def test_special_scores(each_isa):
    """+inf, NaN and all -inf give NaN rows, the canonical one; one -inf a weight of 0; a row reads its past alone."""
    q = torch.ones(1, 1, 6, 1)
    k = torch.tensor([0.0, -torch.inf, 1.0, torch.inf, 0.0, torch.nan]).view(1, 1, 6, 1)
    v = torch.arange(1.0, 7).view(1, 1, 6, 1)
    y = check(each_isa, q, k, v).flatten()
    assert torch.equal(y.isnan(), torch.tensor([False, False, False, True, True, True]))
    assert y[0] == y[1] == 1
    assert check(each_isa, q[:, :, :1], k[:, :, 1:2], v[:, :, 1:2]).isnan().all()
    for isa, some in each_isa(lambda: attention(q, k, v)):
        assert (some.flatten()[3:].view(torch.int32) == 0x7FC00000).all(), isa
        bf16 = attention(q.bfloat16(), k, v)
        assert (bf16.flatten()[3:].view(torch.int16) == 0x7FC0).all(), isa


def test_special_values(each_isa):
    """They reach their own d, of the rows that read them."""
    q, k, v = qkv(1, 1, 1, 40, 40, 24, seed=12)
    v[0, 0, 20, 3], v[0, 0, 30, 23] = torch.nan, torch.inf
    y = check(each_isa, q, k, v)[0, 0]
    wanted = torch.zeros(40, 24, dtype=torch.bool)
    wanted[20:, 3] = wanted[30:, 23] = True
    assert torch.equal(~y.isfinite(), wanted) and (y[30:, 23] == torch.inf).all()


# ---- sizes and refusals ----


@pytest.mark.parametrize(
    "batch, heads, groups, m, t, d", [(0, 2, 2, 3, 3, 8), (2, 2, 1, 0, 5, 8), (1, 0, 0, 2, 2, 8), (1, 1, 1, 2, 2, 0)]
)
def test_empty(batch, heads, groups, m, t, d):
    assert attention(*qkv(batch, heads, groups, m, t, d), scale=1.0).shape == (batch, heads, m, d)


def test_large_strides():
    """Offsets beyond 2^31 elements: a batch axis that steps over them."""
    q, k, v = qkv(2, 1, 1, 1, 3, 4, seed=13)
    step = 2**31 + 16
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(4 * (step + 64))
        whole = torch.from_file(file.name, shared=True, size=step + 64)
        spread = whole.as_strided((2, 1, 3, 4), (step, 12, 4, 1))
        spread.copy_(k)
        assert_bytes_equal(attention(q, spread, v), attention(q, k, v))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda q, k, v: (q[0], k, v), r"q has shape \[4, 3, 8\]; accepted: \[batch, heads, rows, head_dim\]"),
        (lambda q, k, v: (q, k[..., :7], v), r"k has shape \[2, 2, 9, 7\]; accepted: \[2, 2, 9, 8\]"),
        (lambda q, k, v: (q, k, v[:, :, :8]), r"v has shape \[2, 2, 8, 8\]; accepted: \[2, 2, 9, 8\]"),
        (lambda q, k, v: (q[:, :3], k, v), "q has 3 heads and k 2; accepted: a multiple"),
        (lambda q, k, v: (q.double(), k, v), "q is float64; accepted: float32"),
        (lambda q, k, v: (q, k, v.bfloat16()), "v is bfloat16; accepted: float32"),
        (lambda q, k, v: (q, k, v, torch.tensor([0, 7])), "start is 7 for 3 queries and 9 keys; accepted: from 0 to"),
        (lambda q, k, v: (q, k, v, torch.tensor([-1, 0])), "start is -1"),
        (lambda q, k, v: (q, k, v, torch.zeros(3, dtype=torch.int64)), r"start has shape \[3\]; accepted: \[2\]"),
        (lambda q, k, v: (q, k, v, torch.zeros(2)), "start is float32; accepted: int64"),
        (lambda q, k, v: (q, k[:, :, :2], v[:, :, :2]), "start is -1 for 3 queries and 2 keys"),
        (lambda q, k, v: (q, k, v, None, math.nan), "scale is nan; accepted: a finite number"),
    ],
)
def test_refusals(change, words):
    with pytest.raises(RuntimeError, match=words):
        attention(*change(*qkv(2, 4, 2, 3, 9, 8)))
