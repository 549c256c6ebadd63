"""Training beside packed weights: adapters, prompts, norms and biases learn as beside the dequantized weights."""

import copy

import pytest
import torch
from torch import nn

import fp4ext
from fp4ext.testing import generate
from tests.nn.test_transformers_experts import experts as stacked_experts

POLICIES = ["mxfp8", "nvidia", "end_to_end"]
# dy and ŵ are exact in both, and each sum of up to 128 products is rounded once per product in fp32, twice at the end
# in BF16: differences are below 128 · 2^-24 of the sum of magnitudes, or 2^-8 where the dtype is BF16.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


class Adapted(nn.Module):
    """A packed or plain layer with an adapter of low rank beside it."""

    def __init__(self, base, k, n):
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(k, 8, bias=False), nn.Linear(8, n, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def packed(policy, k, n, weight_only, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(k, n, dtype=dtype))
    fp4ext.convert(m, policy)
    q = fp4ext.pack(m)[0]
    if weight_only:
        q.x = None
    return q


def plain(q):
    """The layer of the dequantized weights; its input is quantized as the packed layer's, straight-through."""
    m = nn.Linear(q.in_features, q.out_features, dtype=q.weight.dtype)
    m.weight.data, m.bias.data = q.weight.dequantize(), q.bias.data.clone()
    m.requires_grad_(False)
    if q.x is not None:
        m.register_forward_pre_hook(lambda m, given: (given[0] + (rounded(given[0], q.x) - given[0]).detach(),))
    return m


def rounded(x, spec):
    flat = x.detach().flatten(0, -2)
    return fp4ext.quantize(flat, spec).dequantize(x.dtype).view(x.shape)


def network(bases):
    torch.manual_seed(5)
    blocks = [Adapted(base, 64, 64) for base in bases]
    return nn.Sequential(nn.LayerNorm(64), blocks[0], nn.SiLU(), blocks[1], nn.Tanh(), blocks[2])


def gradients(net, x):
    x = x.clone().requires_grad_()
    net(x).square().mean().backward()
    return [x.grad, *(p.grad for p in net.parameters() if p.requires_grad)]


@pytest.mark.parametrize("weight_only", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_adapters_norms_and_prompts(policy, weight_only):
    bases = [packed(policy, 64, 64, weight_only, seed=i) for i in range(3)]
    x = torch.randn(2, 16, 64)
    got, wanted = gradients(network(bases), x), gradients(network([plain(q) for q in bases]), x)
    assert len(got) == len(wanted) == 1 + 2 + 6
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() <= BOUND[torch.float32] * b.norm()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", [(64,), (16, 64), (2, 3, 64), (0, 64)])
def test_dx_and_the_bias(shape, dtype):
    q = packed("end_to_end", 64, 48, weight_only=True)
    q.bias.requires_grad_()
    x = generate("student_t3", *shape, dtype=dtype, seed=2).requires_grad_()
    dy = generate("gaussian", *shape[:-1], 48, dtype=dtype, seed=3)
    dx, db = torch.autograd.grad(q(x), [x, q.bias], dy)
    wanted = dy.float() @ q.weight.dequantize(torch.float32)
    assert dx.dtype == dtype and (dx - wanted).norm() <= BOUND[dtype] * wanted.norm()
    assert torch.equal(db, dy.float().reshape(-1, 48).sum(0))


def test_under_autocast():
    q = packed("end_to_end", 64, 48, weight_only=False)
    x = torch.randn(8, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = q(x)
    y.sum().backward()
    wanted = torch.ones(8, 48) @ q.weight.dequantize(torch.float32)
    assert y.dtype == torch.bfloat16 and (x.grad - wanted).norm() <= 2**-6 * wanted.norm()


@pytest.mark.parametrize("policy", POLICIES)
def test_experts(policy):
    m, ends = fp4ext.Experts(3, 64, 32, policy=policy), torch.tensor([4, 4, 11], dtype=torch.int32)
    q = fp4ext.pack(nn.Sequential(m))[0]
    q.x = None
    same = fp4ext.Experts(3, 64, 32, policy="bf16")
    same.gate_up_proj.data, same.down_proj.data = (w.dequantize(torch.float32) for w in q.weights)
    x = torch.randn(12, 64)
    dy = torch.randn(12, 64)
    got, wanted = (gradient(f, x, dy, ends) for f in (q, same))
    assert (got - wanted).norm() <= BOUND[torch.float32] * wanted.norm() and not got[11].any()


def gradient(f, x, dy, *given):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x, *given), x, dy)[0]


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_of_transformers(name):
    """Their biases, activations and the router's weights train on too."""
    m = stacked_experts(name)
    holder = nn.Sequential(m)
    fp4ext.convert(holder, "end_to_end")
    q = fp4ext.pack(holder)[0]
    q.x = None
    same = copy.deepcopy(m)
    fp4ext.revert(nn.Sequential(same))
    for stack, w in zip(q.stacks, q.weights, strict=True):
        w = w.dequantize(torch.float32)
        getattr(same, stack).data = w.mT.contiguous() if same.is_transposed else w
    x, width = torch.randn(9, q.weights[0].shape[-1]), q.num_experts
    chosen = torch.stack([torch.randperm(width)[:2] for _ in range(9)])
    weight = torch.rand(9, 2)

    def run(f):
        given = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = f(given[0], chosen, given[1])
        return torch.autograd.grad(y.square().sum(), given)

    for a, b in zip(run(q), run(same), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()  # transformers multiplies in another order


def test_compiled():
    torch._dynamo.reset()
    net, x = network([packed("end_to_end", 64, 64, False, seed=i) for i in range(3)]), torch.randn(2, 16, 64)
    wanted = gradients(net, x)
    net.zero_grad()
    got = gradients(torch.compile(net, backend="aot_eager", fullgraph=True), x)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
    torch._dynamo.reset()


def test_new_weights_between_forward_and_backward_are_an_error():
    m = nn.Sequential(nn.Linear(64, 64))
    fp4ext.convert(m)
    q, x = fp4ext.pack(m), torch.randn(4, 64, requires_grad=True)
    y = q(x)
    fp4ext.refit(q, m)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
