"""attention, the function that users call: defaults, gradients, refusals. The order of sums is tests/ops/'s."""

import pytest
import torch
import torch.nn.functional as F

import fp4ext
from fp4ext.testing import assert_bytes_equal, generate


def qkv(dtype=torch.float32, heads=4, groups=2, m=6, t=6, d=16):
    make = lambda seed, *shape: generate("gaussian", *shape, seed=seed, dtype=dtype)  # noqa: E731
    return make(0, 2, heads, m, d), make(1, 2, groups, t, d), make(2, 2, groups, t, d)


def test_is_attention():
    q, k, v = qkv()
    wanted = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
    torch.testing.assert_close(fp4ext.attention(q, k, v), wanted)
    wanted = F.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True, scale=0.1
    )
    torch.testing.assert_close(fp4ext.attention(q, k, v, scale=0.1), wanted)


def test_without_a_start_the_queries_are_the_last():
    q, k, v = qkv(m=2, t=9)
    assert_bytes_equal(fp4ext.attention(q, k, v), fp4ext.attention(q, k, v, torch.tensor([7, 7])))


@pytest.mark.parametrize("start", [None, [0, 5]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(start, dtype):
    """Those of torch's attention, with grouped heads and ragged starts; nothing flows to keys that no query reads."""
    start = None if start is None else torch.tensor(start)
    leaves = [t.requires_grad_() for t in qkv(dtype, m=4, t=9)]
    y = fp4ext.attention(*leaves, start)
    assert_bytes_equal(y.detach(), fp4ext.attention(*(t.detach() for t in leaves), start))
    dy = generate("gaussian", *y.shape, seed=3, dtype=dtype)
    got = torch.autograd.grad(y, leaves, dy)
    first = torch.tensor([5, 5]) if start is None else start
    mask = torch.arange(9) <= (first[:, None] + torch.arange(4))[..., None]
    plain = [t.detach().float().requires_grad_() for t in leaves]
    keys, values = (t.repeat_interleave(2, 1) for t in plain[1:])
    wanted = torch.autograd.grad(
        F.scaled_dot_product_attention(plain[0], keys, values, mask[:, None]), plain, dy.float()
    )
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g, w.to(dtype))
    if start is not None:
        assert (got[1][0, :, 4:] == 0).all() and (got[1][1, :, :9] != 0).any()


def test_gradients_by_differences():
    """Of the function that the forward computes, not only of torch's."""
    q, k, v = (t.requires_grad_() for t in qkv(m=3, t=5, d=4))
    weight = generate("gaussian", 2, 4, 3, 4, seed=3)
    loss = lambda: (fp4ext.attention(q, k, v) * weight).double().sum()  # noqa: E731
    for leaf, g in zip((q, k, v), torch.autograd.grad(loss(), (q, k, v)), strict=True):
        direction = generate("gaussian", *leaf.shape, seed=4)
        with torch.no_grad():
            leaf += 1e-2 * direction
            up = loss()
            leaf -= 2e-2 * direction
            down = loss()
            leaf += 1e-2 * direction
        torch.testing.assert_close((up - down) / 2e-2, (g * direction).double().sum(), rtol=1e-2, atol=1e-3)


def test_compiles_whole():
    q, k, v = (t.requires_grad_() for t in qkv())
    f = lambda *args: fp4ext.attention(*args).square().sum()  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    eager, got = f(q, k, v), compiled(q, k, v)
    assert torch.equal(eager, got)
    for a, b in zip(torch.autograd.grad(eager, (q, k, v)), torch.autograd.grad(got, (q, k, v)), strict=True):
        assert torch.equal(a, b)


def test_refusals():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="q is torch.float64; accepted: float32, bfloat16, float16"):
        fp4ext.attention(q.double(), k, v)
    with pytest.raises(TypeError, match="k is list; accepted: a torch.Tensor"):
        fp4ext.attention(q, [], v)
    with pytest.raises(ValueError, match="v is on meta; accepted: cpu"):
        fp4ext.attention(q, k, v.to("meta"))
    with pytest.raises(RuntimeError, match="q has 3 heads and k 2"):
        fp4ext.attention(q[:, :3], k, v)
