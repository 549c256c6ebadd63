"""Experts: each expert is a fp4ext.Linear of its own, all of them in one call a GEMM."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4ext
from fp4ext import Dgrad, Fprop, Recipe, Spec, Wgrad, gemm, grouped_linear, quantize
from fp4ext.functional import ops
from fp4ext.nn.activation import silu
from fp4ext.testing import assert_bytes_equal, generate

POLICIES = fp4ext.policies.names()
QUANTIZED = [name for name in POLICIES if name != "bf16"]
DETERMINISTIC = [name for name in QUANTIZED if not fp4ext.policies.get(name).pretrain.needs_rng]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = [0, 1, 37, 64, 0, 16]
K, F = 48, 32


def offsets(counts=COUNTS):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def rows_of(counts=COUNTS):
    ends = [0, *offsets(counts).tolist()]
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def tokens(k=K, counts=COUNTS, rest=0, dtype=torch.float32, seed=1):
    """Rows of experts whose sizes differ a hundredfold; `rest` rows of NaN, which are unassigned."""
    gains = torch.tensor([1.0, 10.0, 0.1])[torch.arange(len(counts)) % 3].repeat_interleave(torch.tensor(counts))
    x = generate("student_t3", sum(counts), k, seed=seed) * gains[:, None]
    return torch.cat([x, torch.full((rest, k), torch.nan)]).to(dtype).requires_grad_()


def weights(n=F, k=K, dtype=torch.float32, seed=2):
    return generate("gaussian", len(COUNTS), n, k, seed=seed, dtype=dtype).mul(k**-0.5).requires_grad_()


def experts(policy, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return fp4ext.Experts(len(COUNTS), K, F, policy=policy, dtype=dtype)


def run(f, leaves, dy=None, seed=7):
    torch.manual_seed(seed)
    y = f()
    dy = generate("outliers30", *y.shape, seed=3, dtype=y.dtype) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def same(got, wanted, what=""):
    for name, a, b in zip(("y", "dx", "dw", "dw2"), got, wanted, strict=False):
        assert_bytes_equal(a, b, f"{what} {name}")
    assert len(got) == len(wanted)


def shard(rng, row):
    return torch.tensor([*rng.tolist(), row, 0])


def by_hand(x, w, dy, recipe, seed=7):
    """The same from fp4ext.quantize and fp4ext.gemm, an expert at a time. outer="tensor" is an expert's own there."""
    torch.manual_seed(seed)
    fprop, dgrad, wgrad = ops.draw_rng(x, 3) if recipe.needs_rng else (torch.zeros(2, dtype=torch.int64),) * 3
    out = torch.float32 if x.dtype == torch.float16 else x.dtype
    y, dx, dw = x.new_zeros(len(x), w.shape[1]), torch.zeros_like(x), torch.zeros_like(w)
    n, k = w.shape[1:]
    for e, rows in enumerate(rows_of()):
        x_e, w_e, dy_e = x[rows], w[e], dy[rows]
        xq = quantize(x_e, recipe.fprop.x, rng=shard(fprop, rows.start), role="x")
        wq = quantize(w_e, recipe.fprop.w, rng=shard(fprop, e * n), role="w")
        y[rows] = gemm(xq, wq, out_dtype=out).to(x.dtype)
        w_b = wq.dequantize(torch.float32) if recipe.dgrad.from_fprop else w_e
        x_b = xq.dequantize(torch.float32) if recipe.wgrad.from_fprop else x_e
        dx[rows] = gemm(
            quantize(dy_e, recipe.dgrad.dy, rng=shard(dgrad, rows.start), role="dy"),
            quantize(w_b, recipe.dgrad.w, axis=-2, rng=shard(dgrad, e * k), role="w"),
            out_dtype=out,
        ).to(x.dtype)
        dw[e] = gemm(
            quantize(dy_e, recipe.wgrad.dy, axis=-2, rng=shard(wgrad, e * n), role="dy"),
            quantize(x_b, recipe.wgrad.x, axis=-2, rng=shard(wgrad, e * k), role="x"),
            out_dtype=torch.float32,
        ).to(w.dtype)
    return [y, dx, dw]


@pytest.mark.parametrize("policy", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_gemm_is_that_of_the_quantized_operands(policy, dtype):
    recipe = fp4ext.policies.get(policy).pretrain
    x, w = tokens(dtype=dtype), weights()
    dy = generate("outliers30", len(x), F, seed=3, dtype=dtype)
    got = run(lambda: grouped_linear(x, w, offsets(), recipe), (x, w), dy)
    same(got, by_hand(x.detach(), w.detach(), dy, recipe), policy)


@pytest.mark.parametrize("policy", DETERMINISTIC)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_expert_is_a_linear_layer(policy, dtype):
    x, w = tokens(dtype=dtype), weights(dtype=dtype)
    recipe = fp4ext.policies.get(policy).pretrain
    dy = generate("outliers30", len(x), F, seed=3, dtype=dtype)
    y, dx, dw = run(lambda: grouped_linear(x, w, offsets(), recipe), (x, w), dy)
    for e, rows in enumerate(rows_of()):
        x_e, w_e = x.detach()[rows].requires_grad_(), w.detach()[e].requires_grad_()
        wanted = run(lambda: fp4ext.linear(x_e, w_e, None, recipe), (x_e, w_e), dy[rows])  # noqa: B023
        same([y[rows], dx[rows], dw[e]], wanted, f"{policy} expert {e}")


@pytest.mark.parametrize("stage", fp4ext.policy.policy.STAGES)
@pytest.mark.parametrize("policy", QUANTIZED)
def test_the_forward_is_that_of_linear_layers(policy, stage):
    """Both products, in every stage: the forward of every policy that ships rounds to nearest."""
    m, x = experts(policy), tokens(rest=2)
    with fp4ext.stage(stage):
        y = m(x, offsets())
        for e, rows in enumerate(rows_of()):
            first, last = fp4ext.Linear(K, 2 * F, False, policy=policy), fp4ext.Linear(F, K, False, policy=policy)
            first.weight, last.weight = nn.Parameter(m.gate_up_proj[e]), nn.Parameter(m.down_proj[e])
            gate, up = first(x[rows]).chunk(2, -1)
            assert_bytes_equal(y[rows], last(silu(gate) * up), f"{policy} {stage} expert {e}")
    assert (y[-2:] == 0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_nobody(policy):
    """NaN there reaches neither outputs nor gradients, and their gradient is zero."""
    m, x, more = experts(policy), tokens(), tokens(rest=5)
    leaves = list(m.parameters())
    dy = generate("outliers30", len(more), K, seed=3)
    wanted = run(lambda: m(x, offsets()), [x, *leaves], dy[: len(x)])
    y, dx, *dw = run(lambda: m(more, offsets()), [more, *leaves], dy)
    same([y[: len(x)], dx[: len(x)], *dw], wanted)
    assert (y[len(x) :] == 0).all() and (dx[len(x) :] == 0).all()
    assert all(t.isfinite().all() for t in (y, dx, *dw))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_expert_without_tokens_learns_nothing(policy):
    m = experts(policy)
    m(tokens(), offsets()).sum().backward()
    for p in m.parameters():
        touched = p.grad.flatten(1).abs().amax(1) > 0
        assert touched.tolist() == [n > 0 for n in COUNTS]
    none = torch.zeros(len(COUNTS), dtype=torch.int32)
    x = torch.randn(4, K, requires_grad=True)
    y = m(x, none)
    y.sum().backward()
    assert (y == 0).all() and (x.grad == 0).all()
    assert m(torch.empty(0, K), none).shape == (0, K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_experts_are_those_of_gemm(dtype):
    """Policy bf16: in the input's dtype, close to torch's; the order is fp4ext's, so rows do not depend on others."""
    x, w = tokens(dtype=dtype), weights(dtype=dtype)
    dy = generate("gaussian", len(x), F, seed=3, dtype=dtype)
    y, dx, dw = run(lambda: grouped_linear(x, w, offsets(), Recipe()), (x, w), dy)
    x, w = x.detach(), w.detach()
    for e, rows in enumerate(rows_of()):
        assert_bytes_equal(y[rows], gemm(x[rows], w[e], out_dtype=dtype))
        assert_bytes_equal(dx[rows], gemm(dy[rows], w[e].T, out_dtype=dtype))
        assert_bytes_equal(dw[e], gemm(dy[rows].T, x[rows].T, out_dtype=torch.float32).to(dtype))
        torch.testing.assert_close(y[rows], x[rows] @ w[e].T, rtol=1.6e-2, atol=1e-3)


@pytest.mark.parametrize("policy", QUANTIZED)
def test_autocast(policy):
    m, x = experts(policy), tokens()
    leaves = [x, *m.parameters()]
    dy = generate("gaussian", len(x), K, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, *dw = run(lambda: m(x, offsets()), leaves, dy)
    half = x.detach().bfloat16().requires_grad_()
    same([y, dx.bfloat16(), *dw], run(lambda: m(half, offsets()), [half, *m.parameters()], dy))
    assert (y.dtype, dx.dtype, *(t.dtype for t in dw)) == (torch.bfloat16, *[torch.float32] * 3)


def test_a_backward_in_sixteen_bits():
    """rl_trainer: dgrad and wgrad multiply the dequantized forward operands."""
    recipe = fp4ext.policies.get("end_to_end").recipe("rl_trainer", "")
    x, w = tokens(dtype=torch.bfloat16), weights()
    dy = generate("gaussian", len(x), F, seed=3, dtype=torch.bfloat16)
    _, dx, dw = run(lambda: grouped_linear(x, w, offsets(), recipe), (x, w), dy)
    for e, rows in enumerate(rows_of()):
        x_hat, w_hat = (
            quantize(t.detach(), s).dequantize(torch.bfloat16)
            for t, s in ((x[rows], recipe.fprop.x), (w[e], recipe.fprop.w))
        )
        assert_bytes_equal(dx[rows], gemm(dy[rows], w_hat.T))
        assert_bytes_equal(dw[e], gemm(dy[rows].T, x_hat.T, out_dtype=torch.float32))


def test_gradients_are_unbiased():
    """The error of a mean of B gradients is 1/B of one's, in every expert, whatever its rows and its RHT's length."""
    recipe = fp4ext.policies.get("end_to_end").pretrain
    x, w = tokens(counts=[16, 37, 0, 128, 48, 64]), weights()
    at = offsets([16, 37, 0, 128, 48, 64])
    dy = generate("gaussian", len(x), F, seed=3)
    x_hat = fp4ext.grouped_quantize(x, recipe.fprop.x, at).dequantize()
    draws, total, one = 96, torch.zeros_like(w), torch.zeros(len(COUNTS))
    true = torch.stack([dy[r].T @ x_hat[r] for r in rows_of([16, 37, 0, 128, 48, 64])])
    error = lambda t: (t - true).square().mean((1, 2))  # noqa: E731
    for seed in range(draws):
        dw = run(lambda: grouped_linear(x, w, at, recipe), (w,), dy, seed)[1]
        total += dw
        one += error(dw).detach() / draws
    ratio = draws * error(total / draws) / one
    assert ratio[2].isnan() and ((ratio > 0.6) & (ratio < 1.4))[[0, 1, 3, 4, 5]].all(), ratio


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wanted", ["x", "w", ""])
def test_only_what_requires_a_gradient_gets_one(policy, wanted):
    x, w = tokens(), weights()
    recipe = fp4ext.policies.get(policy).pretrain
    whole = dict(zip("yxw", run(lambda: grouped_linear(x, w, offsets(), recipe), (x, w)), strict=True))
    x.requires_grad_("x" in wanted), w.requires_grad_("w" in wanted)
    if not wanted:
        torch.manual_seed(7)
        y = grouped_linear(x, w, offsets(), recipe)
        assert not y.requires_grad
        return assert_bytes_equal(y, whole["y"])
    got = run(lambda: grouped_linear(x, w, offsets(), recipe), [{"x": x, "w": w}[n] for n in wanted])
    return same(got, [whole["y"], *(whole[n] for n in wanted)])


@pytest.mark.parametrize("policy", ["nvidia", "end_to_end", "mxfp8"])
def test_only_quantized_copies_are_saved(policy):
    """For any offsets there is room: up to a block less one of padding an expert."""
    x, w = tokens(256, [1024] * 6), generate("gaussian", 6, 16, 256).requires_grad_()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        grouped_linear(x, w, offsets([1024] * 6), fp4ext.policies.get(policy).pretrain)
    assert sum(sizes) / (x.numel() + w.numel()) <= (0.6 if policy != "mxfp8" else 1.1)


@pytest.mark.parametrize("policy", ["mxfp8", "nvidia", "end_to_end"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(policy, reentrant):
    m, x = experts(policy), tokens()
    dy = generate("outliers30", len(x), K, seed=3)
    wanted = run(lambda: m(x, offsets()), [x, *m.parameters()], dy)
    torch.manual_seed(7)
    y = checkpoint(m, x, offsets(), use_reentrant=reentrant)
    y.backward(dy)
    same([y.detach(), x.grad, *(p.grad for p in m.parameters())], wanted)


@pytest.mark.parametrize("policy", ["bf16", "mxfp8", "nvidia", "end_to_end"])
def test_compiled(policy):
    """One graph; the same bytes."""
    torch._dynamo.reset()
    m, x = experts(policy), tokens()
    # Inductor's silu is not torch's to the bit, so each product is compiled alone.
    recipe = m.recipes["pretrain"]
    f = lambda: grouped_linear(x, m.gate_up_proj, offsets(), recipe)  # noqa: E731
    compiled = torch.compile(lambda x, w, at: grouped_linear(x, w, at, recipe), fullgraph=True, backend="aot_eager")
    at = offsets()
    wanted = run(f, [x, m.gate_up_proj])
    same(run(lambda: compiled(x, m.gate_up_proj, at), [x, m.gate_up_proj]), wanted)
    torch._dynamo.reset()


def test_the_module_is_plain():
    """state_dict as transformers' stacked experts have it; a start like nn.Linear's."""
    m = experts("nvidia")
    assert {name: tuple(p.shape) for name, p in m.state_dict().items()} == {
        "gate_up_proj": (len(COUNTS), 2 * F, K),
        "down_proj": (len(COUNTS), K, F),
    }
    assert m.gate_up_proj.abs().max() <= K**-0.5 and m.gate_up_proj.std() > 0.5 * K**-0.5
    assert repr(m) == "Experts(6, features=48, hidden=32, policy=nvidia)"
    assert fp4ext.Experts(2, 8, 4, device="meta", dtype=torch.bfloat16).down_proj.shape == (2, 8, 4)


@pytest.mark.parametrize("sizes, what", [((0, 8, 4), "experts"), ((2, 0, 4), "features"), ((2, 8, 0), "hidden")])
def test_sizes_that_are_none(sizes, what):
    with pytest.raises(ValueError, match=f"{what} is 0; accepted: a whole number from 1"):
        fp4ext.Experts(*sizes)


def test_a_policy_that_changes_with_the_step():
    m = experts(fp4ext.policies.get("end_to_end").with_(bf16_forward_from=10))
    x = tokens()
    early = m(x, offsets())
    m.set_step(10)
    late = m(x, offsets())
    assert not torch.equal(early, late)
    with torch.no_grad():
        assert_bytes_equal(late.detach(), experts("bf16")(x, offsets()))


BAD = {
    "x has shape (118, 40) and w (6, 32, 48); accepted: [T, K] and [E, N, K]": dict(x=torch.ones(118, 40)),
    "x has shape (2, 59, 48) and w (6, 32, 48); accepted": dict(x=torch.ones(2, 59, 48)),
    "w has 6 experts and offsets 2; accepted: one end per expert": dict(offsets=offsets([3, 4])),
    "offsets is torch.int64 (6,); accepted: int32 [E]": dict(offsets=offsets().long()),
    "offsets is list; accepted: int32 [E]": dict(offsets=[3] * 6),
    "x is torch.float64; accepted": dict(x=torch.ones(118, 48).double()),
    "x is on meta; accepted: cpu": dict(x=torch.ones(118, 48, device="meta"), offsets=offsets().to("meta")),
    "offsets is on meta; accepted: cpu": dict(offsets=offsets().to("meta")),
    "a recipe with mean_split is for linear layers": dict(recipe=Recipe(mean_split=True)),
    "offsets[3] is 102; accepted: at most 100, the rows of x": dict(x=torch.ones(100, 48)),
    "dgrad reads the forward operand, which has rht='16'": dict(
        recipe=Recipe(Fprop(*[Spec(rht=16)] * 2), Dgrad(), Wgrad())
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_refusals(message):
    arguments = dict(x=tokens(), w=weights(), offsets=offsets(), recipe=fp4ext.policies.get("mxfp8").pretrain)
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        grouped_linear(**(arguments | BAD[message]))
    assert message in str(error.value)
