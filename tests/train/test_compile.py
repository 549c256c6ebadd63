"""The reference models under torch.compile: one graph for a training step, few for the sampler; the same bytes."""

import pytest
import torch
import torch._inductor.config
from torch._dynamo.testing import CompileCounterWithBackend

import fp4ext
from fp4ext.testing import assert_bytes_equal
from fp4ext.train.models.transformer import Transformer
from fp4ext.train.runs.presets import Shape
from fp4ext.train.sampler import Request, Sampler

SIZES = dict(vocab=256, d=64, heads=2, layers=2, ffn=128, context=64)
SHAPES = {"dense": Shape(**SIZES), "mixture": Shape(**SIZES, experts=4, top_k=2, expert_ffn=64)}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(name, policy):
    m = Transformer(SHAPES[name])
    fp4ext.convert(m, policy)
    with torch.no_grad():
        m.lm_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return m


def gradients(m, f):
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(2))
    m.zero_grad()
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        f(tokens[:, :-1], tokens[:, 1:]).backward()
    return [p.grad.clone() for p in m.parameters() if p.grad is not None]


@pytest.mark.parametrize("policy", [pytest.param("nvidia", marks=pytest.mark.slow), "end_to_end"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_training_step(name, policy):
    m = model(name, policy)
    for a, b in zip(gradients(m, torch.compile(m, backend="aot_eager", fullgraph=True)), gradients(m, m), strict=True):
        assert_bytes_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["nvidia", "end_to_end"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_training_step_by_inductor(name, policy):
    """Inductor keeps fused BF16 intermediates in fp32 unless it is told otherwise. Told, it moves a norm by an ulp of
    fp32, which moves a code of a router's or a layer's input now and then: 5e-2, where other random bits move a
    gradient by 0.2."""
    m = model(name, policy)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        got = gradients(m, torch.compile(m, fullgraph=True))
    for a, b in zip(got, gradients(m, m), strict=True):
        assert (a - b).norm() <= 5e-2 * b.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_samplers_steps(name):
    """Prompts and decode steps: no graph break, and other lengths need no other graph."""
    m, count = model(name, "end_to_end"), CompileCounterWithBackend("aot_eager")
    compiled = Sampler(m, slots=4)
    compiled.model = torch.compile(compiled.model, backend=count, fullgraph=True, dynamic=True)
    graphs = []
    for more in (0, 5, 11):
        requests = [Request(tuple(range(3 + i + more)), most=8 + i + more, stream=i) for i in range(4)]
        assert compiled.generate(requests) == Sampler(m, slots=4).generate(requests)
        graphs.append(count.frame_count)
    assert graphs[0] == graphs[1] == graphs[2]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("stage", ["pretrain", "rl_sampler"])
@pytest.mark.parametrize("packed", [False, True])
def test_export_with_a_dynamic_batch(packed, stage, strict):
    """torch.export at 8 rows, run at 1 to 200."""
    m = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 48))
    fp4ext.convert(m, "end_to_end")
    m = fp4ext.pack(m) if packed else m.eval()
    batch = torch.export.Dim("batch", min=1, max=4096)
    with torch.no_grad(), fp4ext.stage(stage):
        program = torch.export.export(m, (torch.randn(8, 64),), dynamic_shapes=({0: batch},), strict=strict)
        for rows in (1, 2, 17, 200):
            x = torch.randn(rows, 64)
            torch.manual_seed(0)
            got = program.module()(x)
            torch.manual_seed(0)
            assert_bytes_equal(got, m(x))
