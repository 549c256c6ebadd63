"""linear: each of the three GEMMs is exactly the product of the quantized operands that the policy names."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4ext
from fp4ext import Dgrad, Fprop, Recipe, Spec, Wgrad, gemm, quantize
from fp4ext.functional import ops
from fp4ext.nn import layer_ops
from fp4ext.testing import assert_bytes_equal, generate

QUANTIZED = [name for name in fp4ext.policies.names() if name != "bf16"]
RANDOM = [name for name in QUANTIZED if fp4ext.policies.get(name).pretrain.needs_rng]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(policy, k=80, n=48, bias=True, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return fp4ext.Linear(k, n, bias=bias, dtype=dtype, policy=policy)


def inputs(*shape, dtype=torch.float32, seed=1):
    return generate("student_t3", *shape, seed=seed, dtype=dtype).requires_grad_()


def run(module, x, dy=None, seed=7):
    """y, dx and the gradients of the parameters, from that seed."""
    torch.manual_seed(seed)
    y = module(x)
    dy = generate("outliers30", *y.shape, seed=2, dtype=y.dtype) if dy is None else dy
    leaves = [t for t in (x, *module.parameters()) if t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def run_forward(module, x, seed=7):
    torch.manual_seed(seed)
    return module(x)


def by_hand(m, x, dy, seed=7):
    """The same from fp4ext.quantize and fp4ext.gemm, with x and dy as matrices."""
    recipe, w = m.policy.pretrain, m.weight.detach()
    torch.manual_seed(seed)
    fprop, dgrad, wgrad = ops.draw_rng(x, 3) if recipe.needs_rng else (None,) * 3
    out = torch.float32 if x.dtype == torch.float16 else x.dtype
    xq = quantize(x, recipe.fprop.x, rng=fprop, role="x")
    wq = quantize(w, recipe.fprop.w, rng=fprop, role="w")
    y = gemm(xq, wq, m.bias, out).to(x.dtype)
    w = wq.dequantize(torch.float32) if recipe.dgrad.from_fprop else w
    x = xq.dequantize(torch.float32) if recipe.wgrad.from_fprop else x
    dx = gemm(
        quantize(dy, recipe.dgrad.dy, rng=dgrad, role="dy"),
        quantize(w, recipe.dgrad.w, axis=-2, rng=dgrad, role="w"),
        out_dtype=out,
    ).to(dy.dtype)
    dw = gemm(
        quantize(dy, recipe.wgrad.dy, axis=-2, rng=wgrad, role="dy"),
        quantize(x, recipe.wgrad.x, axis=-2, rng=wgrad, role="x"),
        out_dtype=torch.float32,
    ).to(m.weight.dtype)
    return [y, dx, dw] + ([] if m.bias is None else [dy.sum(0, dtype=torch.float32).to(m.bias.dtype)])


def same(got, wanted, what=""):
    for name, a, b in zip(("y", "dx", "dw", "db"), got, wanted, strict=False):
        assert_bytes_equal(a, b, f"{what} {name}")
    assert len(got) == len(wanted)


@pytest.mark.parametrize("policy", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [48, 37, 1, 0])
def test_every_gemm_is_that_of_the_quantized_operands(policy, dtype, tokens):
    """The bias is added in every format. 37 tokens: padded inside; 1: a decode step; 0: an expert without tokens."""
    m, x = layer(policy), inputs(tokens, 80, dtype=dtype)
    dy = generate("outliers30", tokens, 48, seed=2, dtype=dtype)
    same(run(m, x, dy), by_hand(m, x.detach(), dy), f"{policy} {dtype} T={tokens}")


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_weights_may_be_of_sixteen_bits(dtype):
    m, x, dy = layer("nvidia", dtype=dtype), inputs(32, 80, dtype=dtype), generate("gaussian", 32, 48, dtype=dtype)
    got = run(m, x, dy)
    same(got, by_hand(m, x.detach(), dy))
    assert [t.dtype for t in got] == [dtype] * 4


@pytest.mark.parametrize("policy", ["mxfp8", "nvidia", "end_to_end"])
@pytest.mark.parametrize("shape", [(80,), (2, 16, 80), (2, 3, 7, 80), (2, 0, 80)])
def test_leading_dimensions_are_tokens(policy, shape):
    m, x = layer(policy), inputs(*shape)
    got = run(m, x)
    flat = x.detach().reshape(-1, 80) if x.numel() else x.detach().new_empty(0, 80)
    wanted = run(m, flat.requires_grad_(), generate("outliers30", *shape[:-1], 48, seed=2).reshape(len(flat), 48))
    assert got[0].shape == (*shape[:-1], 48) and got[1].shape == shape
    same([got[0].reshape(len(flat), 48), got[1].reshape(flat.shape), *got[2:]], wanted)


@pytest.mark.parametrize("policy", ["mxfp8", "nvidia", "end_to_end"])
def test_strides_do_not_matter(policy):
    m, x = layer(policy), inputs(24, 80)
    wanted = run(m, x)
    dy = generate("outliers30", 24, 48, seed=2)
    for strided in (lambda t: t.T.contiguous().T, lambda t: torch.stack([t, -t], -1)[..., 0]):
        other = copy.deepcopy(m)
        other.weight = nn.Parameter(strided(m.weight.detach()))
        x_strided = strided(x.detach()).requires_grad_()
        assert not x_strided.is_contiguous() and not other.weight.is_contiguous()
        same(run(other, x_strided, strided(dy)), wanted)


def test_an_expanded_gradient_is_accepted():
    m, x = layer("end_to_end"), inputs(32, 80)
    torch.manual_seed(7)
    m(x).sum().backward()  # its dy has no strides
    same([run(m, x)[0], x.grad], run(m, x, torch.ones(32, 48))[:2])


def test_nothing_to_contract():
    w, bias = torch.empty(4, 0), torch.randn(4)
    y = fp4ext.linear(torch.empty(3, 0, requires_grad=True), w, bias, fp4ext.policies.get("mxfp8").pretrain)
    y.sum().backward()
    assert torch.equal(y, bias.expand(3, 4))


# Precision around the layer


def test_bf16_policy_is_nn_linear():
    m, x = layer("bf16"), inputs(16, 80)
    plain = nn.Linear(80, 48)
    plain.load_state_dict(m.state_dict())
    same(run(m, x), run(plain, x))
    with torch.autocast("cpu", torch.bfloat16):
        same(run(m, x), run(plain, x))


@pytest.mark.parametrize("policy", QUANTIZED)
def test_autocast(policy):
    """The input's dtype becomes autocast's; master weights and their gradients stay fp32."""
    m, x = layer(policy), inputs(32, 80)
    dy = generate("gaussian", 32, 48, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, dw, db = run(m, x, dy)
    wanted = by_hand(m, x.detach().bfloat16(), dy)
    same([y, dx.bfloat16(), dw, db], wanted)
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (torch.bfloat16, *[torch.float32] * 3)
    assert torch.equal(dx.bfloat16().float(), dx)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(dgrad=Dgrad(*[Spec("mxfp8")] * 2))], ids=["bf16", "late"])
def test_a_plain_gemm_is_that_of_autocast(recipe):
    """Also beside quantized ones: a forward that a policy switches to BF16 is nn.Linear's, bit for bit."""
    x, w, bias = inputs(32, 80), inputs(48, 80, seed=3), inputs(48, seed=4)
    with torch.autocast("cpu", torch.bfloat16):
        y = fp4ext.linear(x, w, bias, recipe)
        wanted = nn.functional.linear(x, w, bias)
    assert_bytes_equal(y, wanted)
    dy = generate("gaussian", 32, 48, dtype=torch.bfloat16)
    (dw, db), (wanted_dw, wanted_db) = (torch.autograd.grad(t, (w, bias), dy) for t in (y, wanted))
    assert_bytes_equal(dw, wanted_dw)
    assert_bytes_equal(db.bfloat16().float(), wanted_db)  # nn.Linear rounds it to BF16 on its way


def test_one_plain_operand():
    """Weights alone quantized: x stays as it is, and so do both backward GEMMs, on the dequantized w."""
    x, w = inputs(16, 80, dtype=torch.bfloat16), inputs(48, 80, seed=3)
    y = fp4ext.linear(x, w, None, Recipe(Fprop(w=Spec("nvfp4", "sweep"))))
    wq = quantize(w.detach(), "nvfp4", scale="sweep")
    assert_bytes_equal(y, gemm(x.detach(), wq))
    dy = generate("gaussian", 16, 48, dtype=torch.bfloat16)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    assert_bytes_equal(dx, dy @ wq.dequantize(torch.bfloat16))
    assert_bytes_equal(dw, (dy.T @ x.detach()).float())


def test_rotated_forward_cancels():
    """An RHT in the forward: both operands take the same one, with gradients and without."""
    spec = Spec("mxfp8", rht="64")
    recipe = Recipe(Fprop(spec, spec), Dgrad(Spec("mxfp8"), Spec("mxfp8")), Wgrad(Spec("mxfp8"), Spec("mxfp8")))
    x, w = inputs(16, 128), inputs(48, 128, seed=3)
    exact = x.detach() @ w.detach().T
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            error = fp4ext.linear(x, w, None, recipe).detach() - exact
        assert error.square().mean() < 0.01 * exact.square().mean()


def test_a_backward_that_reads_rotated_operands_is_refused():
    spec = Spec("mxfp8", rht="64")
    x, w = inputs(16, 128), inputs(48, 128, seed=3)
    for recipe in (
        Recipe(Fprop(spec, spec)),
        Recipe(Fprop(spec, spec), Dgrad(spec, spec, from_fprop=True), Wgrad(spec, spec)),
    ):
        with pytest.raises(ValueError, match="dgrad reads the forward operand, which has rht='64'; accepted: "):
            fp4ext.linear(x, w, None, recipe)
        with torch.no_grad():
            fp4ext.linear(x, w, None, recipe)


# Bias


@pytest.mark.parametrize("policy", ["end_to_end", "quartet2", "nvidia"])
def test_gradients_are_unbiased(policy):
    """The error of a mean of B gradients is 1/B of one's: the mean goes to the gradient of the quantized forward.

    nvidia's dw rounds x to nearest, so its dx alone, with the weights that dgrad reads (16×16 tiles). quartet2 with the
    two stages that its one lacks to be unbiased.
    """
    p = fp4ext.policies.get(policy)
    if policy == "quartet2":
        two = p.pretrain.dgrad.dy.with_(rht="128x2")
        p = p.with_(pretrain=Recipe(p.pretrain.fprop, Dgrad(two, two, True), Wgrad(two, two, True)))
    m, x, dy = layer(p, 48, 128, bias=False), inputs(128, 48), generate("gaussian", 128, 128, seed=2)
    recipe = p.pretrain
    w_hat = quantize(m.weight.detach(), recipe.dgrad.w if policy == "nvidia" else recipe.fprop.w).dequantize()
    true = [dy @ w_hat, dy.T @ quantize(x.detach(), recipe.fprop.x).dequantize()][: 1 if policy == "nvidia" else 2]
    draws = 128
    total, one = [torch.zeros_like(t) for t in true], [0.0] * len(true)
    for seed in range(draws):
        for i, got in enumerate(run(m, x, dy, seed)[1 : 1 + len(true)]):
            total[i] += got
            one[i] += (got - true[i]).square().mean().item() / draws
    for mean_of_one, sum_of_all, wanted in zip(one, total, true, strict=True):
        ratio = draws * (sum_of_all / draws - wanted).square().mean().item() / mean_of_one
        assert 0.7 < ratio < 1.3, (policy, ratio)


# What is asked for, and what is kept


@pytest.mark.parametrize("policy", QUANTIZED)
@pytest.mark.parametrize("wanted", ["x", "w", "b", "xw", "xb", "wb"])
def test_only_what_requires_a_gradient_gets_one(policy, wanted):
    m, x = layer(policy), inputs(32, 80)
    whole = dict(zip("yxwb", run(m, x), strict=True))
    for name, t in (("x", x), ("w", m.weight), ("b", m.bias)):
        t.requires_grad_(name in wanted)
    same(run(m, x), [whole["y"], *(whole[name] for name in wanted)])


def saved_bytes(f):
    """Bytes that autograd keeps for the backward of f, which returns what to keep alive."""
    sizes = []

    def pack(t):
        sizes.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        f()
    return sum(sizes)


@pytest.mark.parametrize("policy", ["nvidia", "end_to_end", "quartet2", "mxfp8"])
@pytest.mark.parametrize("autocast", [False, True])
def test_only_quantized_copies_are_saved(policy, autocast):
    m, x = layer(policy, 256, 32), inputs(1024, 256)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        kept = saved_bytes(lambda: m(x))
    bits = fp4ext.storage_bits(m)["saved_activations"]
    assert kept / x.numel() <= bits / 8 * 1.07 and (bits > 5 or kept / x.numel() <= 0.6)
    m.weight.requires_grad_(False)
    assert saved_bytes(lambda: m(x)) <= 0.05 * kept  # x is not needed then


@pytest.mark.parametrize("policy", QUANTIZED)
def test_without_gradients(policy):
    """The same output, and nothing kept."""
    m, x = layer(policy), inputs(32, 80)
    wanted = run(m, x)[0]
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            torch.manual_seed(7)
            assert saved_bytes(lambda: m(x)) == 0
            torch.manual_seed(7)
            y = m(x)
        assert_bytes_equal(y.clone(), wanted)
        assert not y.requires_grad


def test_there_is_no_second_derivative():
    """Codes have no gradient: a second derivative would be silently wrong."""
    m, x = layer("nvidia"), inputs(16, 80)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(m(x).square().sum(), x, create_graph=True)


# Random numbers


@pytest.mark.parametrize("policy", RANDOM)
def test_torch_manual_seed_decides(policy):
    m, x = layer(policy), inputs(32, 80)
    same(run(m, x, seed=3), run(m, x, seed=3))
    assert_bytes_equal(run(m, x, seed=4)[0], run(m, x, seed=3)[0], "y")
    assert not torch.equal(run(m, x, seed=4)[2], run(m, x, seed=3)[2])


def test_the_rng_state_resumes_bit_for_bit():
    m, x = layer("end_to_end"), inputs(32, 80)

    def steps(n):
        for _ in range(n):
            m(x).square().mean().backward()
        return m.weight.grad.clone()

    torch.manual_seed(5)
    steps(2)
    state, grad = torch.get_rng_state(), m.weight.grad.clone()
    wanted = steps(2)
    torch.manual_seed(99)
    torch.set_rng_state(state)
    m.weight.grad = grad
    assert_bytes_equal(steps(2), wanted)


@pytest.mark.parametrize("policy", ["mxfp8", "nvidia", "end_to_end"])
def test_a_module_used_twice(policy):
    m, a, b = layer(policy), inputs(32, 80), inputs(16, 80, seed=5)
    torch.manual_seed(7)
    (m(a).sum() + m(b).sum()).backward()
    torch.manual_seed(7)
    parts = [torch.autograd.grad(y.sum(), (m.weight, m.bias)) for y in (m(a), m(b))]
    assert_bytes_equal(m.weight.grad, parts[0][0] + parts[1][0])
    assert_bytes_equal(m.bias.grad, parts[0][1] + parts[1][1])


@pytest.mark.parametrize("policy", ["mxfp8", "nvidia", "end_to_end"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(policy, reentrant):
    """The dropout in between tells whether the recomputation draws what the forward drew."""
    block = nn.Sequential(layer(policy, 80, 64), nn.Dropout(0.5), layer(policy, 64, 48, seed=1))
    x = inputs(32, 80)
    wanted = run(block, x)
    torch.manual_seed(7)
    y = checkpoint(block, x, use_reentrant=reentrant)
    y.backward(generate("outliers30", 32, 48, seed=2))
    got = [y.detach(), x.grad, *(p.grad for p in block.parameters())]
    for a, b in zip(got, wanted, strict=True):
        assert_bytes_equal(a, b)


class Pair(nn.Module):
    """Two layers that read the same x, as the projections of attention do: compiled code must not merge their draws."""

    def __init__(self, policy, bias):
        super().__init__()
        self.a, self.b = layer(policy, 64, 48, bias), layer(policy, 64, 48, bias, seed=1)

    def forward(self, x):
        return self.a(x).relu() - self.b(x)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("policy", ["mxfp8", "nvidia", "end_to_end"])
@pytest.mark.parametrize(
    "backend, bias", [("aot_eager", True), pytest.param("inductor", False, marks=pytest.mark.slow)]
)
def test_compiled_equals_eager(policy, backend, bias):
    """Inductor sums a bias's gradient in an order of its own, so it is left out there."""
    m, x = Pair(policy, bias), inputs(20, 64)
    compiled = torch.compile(m, fullgraph=True, backend=backend)
    for a, b in zip(run(compiled, x), run(m, x), strict=True):
        assert_bytes_equal(a, b)
    if policy == "nvidia":
        with torch.no_grad():
            assert_bytes_equal(*(run_forward(f, x) for f in (compiled, m)))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_checkpoint():
    block, x = nn.Sequential(layer("nvidia", 80, 64), nn.ReLU(), layer("nvidia", 64, 48, seed=1)), inputs(32, 80)
    parts = list(block.parameters())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x):
        return checkpoint(block, x, use_reentrant=False)

    wanted = run(block, x)
    torch.manual_seed(7)
    y = f(x)
    got = torch.autograd.grad(y, [x, *parts], generate("outliers30", 32, 48, seed=2))
    for a, b in zip([y.detach(), *got], wanted, strict=True):
        assert_bytes_equal(a, b)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_step_does_not_compile_again():
    from torch._dynamo.testing import CompileCounter

    count = CompileCounter()
    m, x = layer(fp4ext.policies.get("nvidia").with_(bf16_forward_from=3)), inputs(16, 80)
    compiled = torch.compile(m, fullgraph=True, backend=count)
    for step, graphs in enumerate([1, 1, 1, 2, 2]):
        m.set_step(step)
        compiled(x)
        assert count.frame_count == graphs, step


# Stages and steps


def test_sampler_and_trainer_agree_bit_for_bit():
    """On any split of the batch, though its rows differ in size: each has an outer scale of its own."""
    m = layer("end_to_end")
    x = (generate("gaussian", 24, 80) * torch.exp2(torch.arange(24.0) / 4)[:, None]).bfloat16().requires_grad_()
    with fp4ext.stage("rl_trainer"):
        trainer = m(x)
    with fp4ext.stage("rl_sampler"), torch.no_grad():
        assert_bytes_equal(m(x), trainer.detach())
        assert_bytes_equal(torch.cat([m(row) for row in x.split([1, 7, 16])]), trainer.detach())
    recipe = m.policy.recipe("rl_sampler", "")
    xq, wq = quantize(x.detach(), recipe.fprop.x), quantize(m.weight.detach(), recipe.fprop.w)
    assert_bytes_equal(trainer.detach(), gemm(xq, wq, m.bias))


def test_the_trainers_backward_is_bf16_on_the_dequantized_operands():
    m, x = layer("end_to_end"), inputs(24, 80, dtype=torch.bfloat16)
    dy = generate("gaussian", 24, 48, dtype=torch.bfloat16)
    with fp4ext.stage("rl_trainer"):
        _, dx, dw, _ = run(m, x, dy)
    fprop = m.policy.recipe("rl_sampler", "").fprop
    w_hat, x_hat = (quantize(t.detach(), s).dequantize(torch.bfloat16) for t, s in ((m.weight, fprop.w), (x, fprop.x)))
    assert_bytes_equal(dx, gemm(dy, w_hat.mT))
    assert_bytes_equal(dw, gemm(dy.mT, x_hat.mT, out_dtype=torch.float32))


def test_a_step_switches_the_forward_to_bf16():
    m, x = layer(fp4ext.policies.get("mxfp8").with_(bf16_forward_from=10)), inputs(16, 80)
    for step, plain in ((9, False), (10, True), (0, False)):
        m.set_step(step)
        assert torch.equal(m(x), nn.functional.linear(x, m.weight, m.bias)) is plain
    m.set_policy("bf16", "lm_head")
    assert (m.policy.name, m.policy_name) == ("bf16", "lm_head") and "policy=bf16" in repr(m)


# Refusals

BAD = {
    "x is torch.float64; accepted: float32, bfloat16, float16 (rounding float64 twice": (
        TypeError, lambda m: m(torch.ones(2, 80, dtype=torch.float64))),
    "x is torch.int64; accepted: ": (TypeError, lambda m: m(torch.ones(2, 80, dtype=torch.int64))),
    "x is list; accepted: ": (TypeError, lambda m: m([1.0] * 80)),
    "x has shape (2, 79); accepted: [.., 80]": (ValueError, lambda m: m(torch.ones(2, 79))),
    "x has shape (); accepted: [.., 80]": (ValueError, lambda m: m(torch.ones(()))),
    "x is on meta; accepted: cpu": (ValueError, lambda m: m(torch.ones(2, 80, device="meta"))),
    "weight is torch.float64; accepted: ": (TypeError, lambda m: m.double()(torch.ones(2, 80))),
    "weight has shape (3840,); accepted: [N, K]": (
        ValueError, lambda m: fp4ext.linear(torch.ones(2, 80), m.weight.flatten(), None, m.policy.pretrain)),
    "bias has shape (47,); accepted: (48,)": (
        ValueError, lambda m: fp4ext.linear(torch.ones(2, 80), m.weight, m.bias[1:], m.policy.pretrain)),
    "unknown policy 'fp5'; policies: bf16, mxfp8, nvidia": (ValueError, lambda m: m.set_policy("fp5")),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD, ids=lambda m: m)
@pytest.mark.parametrize("autocast", [False, True])
def test_refusals(message, autocast):
    """They say what is accepted, and draw nothing."""
    m = layer("end_to_end")
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(BAD[message][0]) as error:
        BAD[message][1](m)
    assert message in str(error.value)
    assert torch.equal(torch.get_rng_state(), state)


# Mean split


def mean_split(**changes):
    return fp4ext.policies.get("end_to_end").with_(**({"mean_split": True} | changes))


def test_mean_split_quantizes_what_differs():
    """By hand: the mean's product in fp32, the rest quantized. No mean in the sampler."""
    m, x = layer(mean_split()), inputs(48, 80)
    spec = m.policy.pretrain.fprop
    mean = x.detach().mean(0)
    shift = m.weight.detach() @ mean + m.bias.detach()
    wanted = gemm(quantize(x.detach() - mean, spec.x), quantize(m.weight.detach(), spec.w), shift, torch.float32)
    assert torch.equal(m(x), wanted)
    with torch.no_grad():
        assert torch.equal(m(x), wanted)
        with fp4ext.stage("rl_sampler"):
            assert torch.equal(m(x)[:5], m(x[:5]))


def test_mean_split_helps_where_there_is_a_mean():
    x = torch.randn(128, 80) + 8 * torch.randn(80)
    exact = nn.functional.linear(x, (m := layer(mean_split())).weight, m.bias)
    error = {split: (layer(mean_split(mean_split=split))(x) - exact).norm() for split in (False, True)}
    assert error[True] < 0.25 * error[False]


@pytest.mark.parametrize("tokens", [64, 37, 1, 0])
def test_gradients_of_mean_split(tokens):
    """They are those of a linear layer, to within the rounding of a backward in MXFP8."""
    policy = fp4ext.policies.get("mxfp8").with_(mean_split=True)
    m, plain = layer(policy), nn.Linear(80, 48)
    plain.load_state_dict(m.state_dict())
    x = (torch.randn(tokens, 80) + 4).requires_grad_()
    dy = torch.randn(tokens, 48)
    for got, wanted in zip(run(m, x, dy), run(plain, x, dy), strict=True):
        assert got.shape == wanted.shape and (got - wanted).norm() <= 0.06 * wanted.norm()


@pytest.mark.parametrize(
    ("stage", "invariant", "order"),
    [("pretrain", False, "fast"), ("pretrain", True, "invariant"), ("rl_trainer", False, "invariant")],
)
def test_the_order_of_sums_is_the_stages(stage, invariant, order, monkeypatch):
    """Every product of a layer's forward and backward asks for it; the CPU has one order, so the results are equal."""
    asked = []
    gemm = layer_ops.gemm
    monkeypatch.setattr(layer_ops, "gemm", lambda *a, **k: asked.append(k["accumulate"]) or gemm(*a, **k))
    layer = fp4ext.Linear(32, 16, policy=fp4ext.policies.get("end_to_end").with_(invariant=invariant))
    with fp4ext.stage(stage):
        layer(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert asked == [order] * 3
