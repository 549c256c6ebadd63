"""In the stages of RL a token's logits depend on it and its past alone: byte for byte, however they are computed."""

import contextlib

import pytest
import torch

import fp4ext
from fp4ext.testing import assert_bytes_equal
from fp4ext.train import Shape
from fp4ext.train.models import products
from fp4ext.train.models.cache import FORMATS, Past, Store
from fp4ext.train.models.transformer import Transformer

SHAPE = Shape(layers=2, d=96, heads=3, ffn=144, context=48)
MOE = Shape(layers=2, d=96, heads=3, ffn=48, context=48, experts=7, top_k=3, expert_ffn=80)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model(policy, shape=SHAPE):
    made = Transformer(shape, seed=1)
    torch.nn.init.normal_(made.lm_head.weight, std=0.1, generator=torch.Generator().manual_seed(2))
    if policy != "bf16":
        fp4ext.convert(made, policy)
    products.serve_invariant(made)
    return made


def tokens(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def past(batch, dtype, shape=SHAPE, start=0, kv="bf16"):
    """With garbage where nothing has been written."""
    size = (shape.layers, batch, shape.heads, shape.context, shape.head_dim)
    stores = [Store.empty(*size, FORMATS[kv], dtype) for _ in range(2)]
    for store in stores:
        for t in store.parts:
            t.fill_(torch.nan if t.is_floating_point() else 255)
    return Past(*stores, torch.full((batch,), start))


@contextlib.contextmanager
def running(activations, stage="rl_sampler"):
    with fp4ext.stage(stage), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, activations == "bf16"):
        yield


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("activations", DTYPES)
@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("policy", ["bf16", "mxfp8", "nvidia", "end_to_end"])
def test_whole_equals_token_by_token(policy, shape, activations):
    """A prompt fed whole, in pieces, and token by token through a cache."""
    m, x = model(policy, shape), tokens(3, 40)
    with running(activations):
        whole = m(x)
        for cuts in ([40], [17, 18, 33, 40], list(range(1, 41))):
            cache, begin = past(3, DTYPES[activations], shape), 0
            for end in cuts:
                logits = m(x[:, begin:end], past=cache)
                assert_bytes_equal(logits, whole[:, begin:end], f"{begin}:{end}")
                cache.start += end - begin
                begin = end


@pytest.mark.parametrize("kv", ["mxfp8", "nvfp4"])
def test_a_quantized_cache_is_a_rounding_of_the_model(kv):
    """Whole, and token by token through codes: the same bits; other bits than without. Gradients pass."""
    m, x = model("end_to_end"), tokens(3, 20)
    with running("bf16"):
        plain = m(x)
        m.set_cache(FORMATS[kv])
        whole, cache = m(x), past(3, torch.bfloat16, kv=kv)
        for i in range(20):
            assert_bytes_equal(m(x[:, i : i + 1], past=cache), whole[:, i : i + 1], f"{i}")
            cache.start += 1
    assert not torch.equal(whole, plain) and cache.keys.nbytes < 0.6 * past(3, torch.bfloat16).keys.nbytes
    with fp4ext.stage("rl_trainer"), torch.autocast("cpu", torch.bfloat16):
        logits = m(x)
    assert_bytes_equal(logits.detach(), whole, "rl_trainer")
    logits.square().sum().backward()
    assert m.blocks[0].attention.qkv.weight.grad.view(3, -1).any(1).all()


@pytest.mark.parametrize("activations", DTYPES)
@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("policy", ["bf16", "end_to_end"])
def test_batch_mates_do_not_matter(policy, shape, activations):
    m, x = model(policy, shape), tokens(70, 21)
    with running(activations):
        whole = m(x)
        for rows in ([5], [69, 0, 3], list(range(40, 70))):
            assert_bytes_equal(m(x[rows]), whole[rows], f"rows {rows[:3]}…")
        # a ragged decode: each sequence at a position of its own
        cache = past(70, DTYPES[activations], shape)
        m(x, past=cache)
        at = torch.arange(70) % 21
        cache.start = at
        assert_bytes_equal(m(x[range(70), at][:, None], past=cache)[:, 0], whole[range(70), at], "ragged")


def test_a_mate_a_million_times_larger_does_not_matter():
    """Where a power of two as outer scale would not do: block scales that are subnormal beside such a mate."""
    layer = fp4ext.Linear(64, 32, bias=False)
    x = torch.randn(4, 64)
    x[3] *= 2.0**20
    with running("fp32"):
        assert_bytes_equal(layer(x)[:3], layer(x[:3]))
    spec = fp4ext.policies.get("end_to_end").recipe("rl_sampler", "up").fprop.x.with_(outer="pow2")
    y, alone = (fp4ext.quantize(rows, spec).dequantize() for rows in (x, x[:3]))
    assert not torch.equal(y[:3], alone)


@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
def test_threads_do_not_matter(shape):
    m, x = model("end_to_end", shape), tokens(16, 48)
    with running("bf16"):
        torch.set_num_threads(1)
        alone = m(x)
        torch.set_num_threads(2)
        assert_bytes_equal(m(x), alone)


@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("policy", ["bf16", "end_to_end"])
def test_the_trainers_forward_is_the_samplers(policy, shape):
    """With gradients too; and the packed copy gives the same from codes."""
    m, x = model(policy, shape), tokens(5, 30)
    with running("bf16"):
        wanted = m(x)
    packed = fp4ext.pack(m)
    with running("bf16"):
        assert_bytes_equal(packed(x), wanted, "packed")
    with fp4ext.stage("rl_trainer"), torch.autocast("cpu", torch.bfloat16):
        logits = m(x)
    assert_bytes_equal(logits.detach(), wanted, "rl_trainer")
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())


def test_the_same_experts_are_chosen():
    """For a token in a batch, alone, and by the trainer with gradients: read where the experts get their rows."""
    m, x = model("end_to_end", MOE), tokens(4, 20)
    loads = []
    note = lambda _, args: loads.append(args[1].diff(prepend=args[1].new_zeros(1)))  # noqa: E731
    for block in m.blocks:
        block.mlp.experts.register_forward_pre_hook(note)
    with running("bf16"):
        m(x)
        together = loads[:]
        loads.clear()
        for row in x:
            m(row[None])
    assert all(torch.equal(sum(loads[layer::2]), together[layer]) for layer in range(2))
    assert sum(together).sum() == 2 * 3 * 80 and (sum(together) > 0).all()
    loads.clear()
    with fp4ext.stage("rl_trainer"), torch.autocast("cpu", torch.bfloat16):
        m(x)
    assert all(map(torch.equal, loads, together))


def test_the_gradient_is_that_of_the_forward():
    """BF16 on the dequantized operands: near the gradient of the model in plain fp32 at the dequantized weights."""
    m, x = model("end_to_end"), tokens(2, 16)
    y = tokens(2, 16, seed=1)
    with fp4ext.stage("rl_trainer"), torch.autocast("cpu", torch.bfloat16):
        torch.nn.functional.cross_entropy(m(x).flatten(0, 1), y.flatten()).backward()
    got = {name: p.grad.clone() for name, p in m.named_parameters()}
    plain = model("bf16")
    for name, module in m.named_modules():
        if isinstance(module, fp4ext.Linear):
            spec = module.recipes["rl_trainer"].fprop.w
            plain.get_submodule(name).weight.data = fp4ext.quantize(module.weight, spec).dequantize()
    torch.nn.functional.cross_entropy(plain(x).flatten(0, 1), y.flatten()).backward()
    for name, p in plain.named_parameters():
        assert torch.cosine_similarity(got[name].flatten(), p.grad.flatten(), 0) > 0.95, name
