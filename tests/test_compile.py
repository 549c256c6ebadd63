"""torch.compile, checkpointing and gradients off: each draw of random bits happens once, in the order of eager code.

Where the model's own operations are exact under inductor too (products, relu, sums of two), whole trainings are
compared byte for byte. Elsewhere the draws themselves are: what each forward drew, and what each backward read.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4ext
from fp4ext.functional import ops
from fp4ext.functional.grouped import expert_ends
from fp4ext.nn import layer_ops
from fp4ext.testing import assert_bytes_equal

RANDOM = ["nvidia", "quartet2", "end_to_end", "mxfp8_backward"]  # the last has no draw: it must not become one
BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """Three projections of one input, and one after torch's attention."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).view(*x.shape[:2], 4, 16).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).reshape(x.shape))


class Mixture(nn.Module):
    """Two experts to a token, by the parity of its place: no router whose sums a compiler could order anew."""

    def __init__(self):
        super().__init__()
        self.experts = fp4ext.Experts(4, 64, 32)

    def forward(self, x):
        rows = x.flatten(0, 1)
        chosen, order = (torch.arange(len(rows), device=x.device) % 4).sort(stable=True)
        y = self.experts.product(rows[order], "gate_up_proj", expert_ends(chosen, 4)).relu()
        return x + y[order.argsort()].view(x.shape)


class Twice(nn.Module):
    """One layer called twice on one input: two equal calls, which draw apart."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.a(x).relu() - 2 * self.a(x)


class Wide(nn.Module):
    """Layers that do not depend on each other, of such sizes that another order needs less memory at its peak."""

    def __init__(self):
        super().__init__()
        self.big = nn.ModuleList(nn.Linear(64, 1024, bias=False) for _ in range(3))
        self.small = nn.ModuleList(nn.Linear(1024, 64, bias=False) for _ in range(3))

    def forward(self, x):
        wide = [big(x).relu() for big in self.big]
        for small, t in zip(self.small, wide, strict=True):
            x = x + small(t)
        return x


MODELS = {"attention": Attention, "mixture": Mixture, "twice": Twice, "wide": Wide}


def model(name, policy):
    torch.manual_seed(0)
    m = nn.Sequential(MODELS[name](), MODELS[name]())
    fp4ext.convert(m, policy)
    return m


def plain(m, x):
    return m(x)


def blocks(reentrant):
    """Each block is checkpointed."""

    def run(m, x):
        for block in m:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    return run


INSIDE = {"none": plain, "checkpoint": blocks(False)}


def data(step):
    return torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()


def train(m, f, steps, seed=1):
    """The parameters after some steps of SGD, every third of them after an evaluation without gradients."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    for step in range(steps):
        if step % 3 == 2:
            with torch.no_grad():
                f(m, data(1000 + step))
        optimizer.zero_grad()
        f(m, data(step)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in m.parameters()]


def compiled_inside(inner, backend):
    """The whole function, checkpoints included, is one compiled graph."""
    whole = torch.compile(inner, backend=backend, fullgraph=True)
    return lambda m, x: whole(m, x)


def compiled_outside(reentrant, backend):
    """Each block is compiled, and checkpointed by eager code around it."""

    def run(m, x):
        for block in m:
            if not hasattr(block, "whole"):
                object.__setattr__(block, "whole", torch.compile(block, backend=backend, fullgraph=True))
            x = checkpoint(block.whole, x, use_reentrant=reentrant)
        return x

    return run


WAYS = {
    "compiled": (plain, lambda backend: compiled_inside(plain, backend)),
    "checkpoint inside": (blocks(False), lambda backend: compiled_inside(blocks(False), backend)),
    "checkpoint outside": (blocks(False), lambda backend: compiled_outside(False, backend)),
    "reentrant outside": (blocks(True), lambda backend: compiled_outside(True, backend)),
}


def check_training(name, policy, way, backend, steps):
    eager, compiled = WAYS[way]
    wanted = train(model(name, policy), eager, steps)
    got = train(model(name, policy), compiled(backend), steps)
    for a, b in zip(got, wanted, strict=True):
        assert_bytes_equal(a, b)


# All that is compiled is the same under every policy but for the recipe: each way for one, each policy for one way.
COMPILED = [
    pytest.param(name, way, policy, marks=() if way == "compiled" or policy == "end_to_end" else pytest.mark.slow)
    for name in ("attention", "mixture")
    for way in WAYS
    for policy in RANDOM
]


@pytest.mark.parametrize(("name", "way", "policy"), COMPILED)
def test_compiled_training_is_eager_training(name, way, policy):
    check_training(name, policy, way, "aot_eager", steps=4)


@pytest.mark.parametrize("policy", [pytest.param("nvidia", marks=pytest.mark.slow), "end_to_end"])
@pytest.mark.parametrize("name", ["attention", pytest.param("twice", marks=pytest.mark.slow), "wide"])
def test_by_inductor(name, policy):
    check_training(name, policy, "compiled", "inductor", steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("policy", RANDOM)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["attention", "mixture"])
def test_twenty_steps_by_inductor(name, way, policy):
    check_training(name, policy, way, "inductor", steps=20)


@pytest.mark.parametrize("policy", ["nvidia", "end_to_end"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("compile", [False, True])
def test_every_step_has_bits_of_its_own(policy, reentrant, compile):
    """Eight backwards of one batch through a checkpoint give eight gradients."""
    m = nn.Linear(64, 64)
    fp4ext.convert(nn.ModuleList([m]), policy)
    f = lambda x: torch.relu(m(x))  # noqa: E731
    f = torch.compile(f, backend="aot_eager") if compile else f
    x, dy, seen = torch.randn(48, 64), torch.randn(48, 64), set()
    for _ in range(8):
        m.zero_grad()
        checkpoint(f, x.clone().requires_grad_(), use_reentrant=reentrant).backward(dy)
        seen.add(m.weight.grad.numpy().tobytes())
    assert len(seen) == 8


# Models whose own operations inductor rounds in its own way: the draws are compared


@contextlib.contextmanager
def recorded():
    """What is drawn, and what backwards read, in order."""
    drawn, read = [], []
    draw, streams = ops.draw_states, layer_ops._streams

    def drawing(like, count, rank=None):
        drawn.append(draw(like, count, rank))
        return drawn[-1]

    def reading(states):
        read.append(states.clone())
        return streams(states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "draw_states", drawing)
        patch.setattr(layer_ops, "_streams", reading)
        yield drawn, read


def transformers_model(name):
    transformers = pytest.importorskip("transformers")
    size = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    size |= dict(num_key_value_heads=2, head_dim=16)
    if name == "Qwen3Moe":
        size |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**size))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", [pytest.param("nvidia", marks=pytest.mark.slow), "end_to_end"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
def test_models_of_transformers(name, policy, backend):
    """One graph, the draws of eager code, and the loss and gradients of eager code.

    Inductor fuses norms and activations, which moves fp32 sums by an ulp or two; a swept code that lands on the other
    side of a tie then moves a gradient, so 1e-2 separates that from other random bits, which move it by 0.1 or more.
    """
    m = transformers_model(name)
    fp4ext.convert(m, policy)
    ids = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(3))

    def run(f):
        m.zero_grad()
        torch.manual_seed(1)
        with recorded() as (drawn, read):
            f(input_ids=ids, labels=ids).loss.backward()
        return drawn, read, [p.grad.clone() for p in m.parameters() if p.grad is not None]

    (drawn, read, wanted), (drawn_c, read_c, got) = run(m), run(torch.compile(m, backend=backend, fullgraph=True))
    layers = 2 * (7 if name == "Llama" else 4 + 2)
    assert len(drawn) == len(drawn_c) == layers and len(read) == len(read_c) == 2 * layers
    for a, b in zip([*drawn, *read], [*drawn_c, *read_c], strict=True):
        assert_bytes_equal(b, a)
    for a, b in zip(got, wanted, strict=True):
        if backend == "aot_eager":
            assert_bytes_equal(a, b)
        assert (a - b).norm() <= 1e-2 * b.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantize_draws_in_order(backend):
    """fp4ext.quantize without an rng, many times on equal inputs."""
    spec = fp4ext.Spec("nvfp4", rounding="stochastic")

    def f(x):
        return torch.stack([fp4ext.quantize(x, spec).dequantize() for _ in range(4)])

    x = torch.randn(16, 64)
    torch.manual_seed(3)
    wanted = f(x)
    torch.manual_seed(3)
    assert_bytes_equal(torch.compile(f, backend=backend, fullgraph=True)(x), wanted)
    assert len({t.numpy().tobytes() for t in wanted}) == 4


def test_a_mixture_has_no_guard_on_its_values():
    """Other loads of the experts, no other graph."""
    from torch._dynamo.testing import CompileCounter

    m, count = transformers_model("Qwen3Moe"), CompileCounter()
    fp4ext.convert(m, "end_to_end")
    f = torch.compile(m, backend=count, fullgraph=True)
    for seed in range(3):
        f(input_ids=torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(seed)))
    assert count.frame_count == 1
