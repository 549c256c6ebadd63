"""The stage: of a thread, nested, seen by recomputations wherever and whenever they happen."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fp4ext
from fp4ext.policy.stages import STAGES, current_stage
from fp4ext.testing import assert_bytes_equal


class Seen(nn.Linear):
    """Says in which stage it ran."""

    def forward(self, x):
        self.stages.append(fp4ext.policy.stages.stage_of(self))
        return super().forward(x)


def seen():
    m = Seen(8, 8)
    m.stages = []
    return m


def x():
    return torch.randn(4, 8, requires_grad=True)


def test_stages_nest():
    assert STAGES == ("pretrain", "rl_sampler", "rl_trainer") and current_stage() == "pretrain"
    with fp4ext.stage("rl_sampler"):
        with fp4ext.stage("rl_trainer"):
            assert current_stage() == "rl_trainer"
        assert current_stage() == "rl_sampler"
    with pytest.raises(KeyError), fp4ext.stage("rl_sampler"):
        raise KeyError
    assert current_stage() == "pretrain"


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match="unknown stage 'train'; accepted: pretrain, rl_sampler, rl_trainer"):
        fp4ext.stage("train")
    assert current_stage() == "pretrain"


def test_a_thread_has_its_own():
    """Two threads are in two stages at once, and neither's end moves the other."""
    meet, found = threading.Barrier(2, timeout=60), {}

    def run(name):
        with fp4ext.stage(name):
            meet.wait()
            found[name] = current_stage()
            meet.wait()
        found[f"after {name}"] = current_stage()

    with fp4ext.stage("rl_trainer"):
        threads = [threading.Thread(target=run, args=(name,)) for name in ("rl_sampler", "rl_trainer")]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert current_stage() == "rl_trainer"
    assert found == {
        "rl_sampler": "rl_sampler",
        "rl_trainer": "rl_trainer",
        "after rl_sampler": "pretrain",
        "after rl_trainer": "pretrain",
    }


def test_interleaved_coroutines_are_told():
    """They share a thread's stage, so a block that another one ends in the middle of raises."""

    def coroutine(name):
        with fp4ext.stage(name):
            yield

    first, second = coroutine("rl_sampler"), coroutine("rl_trainer")
    next(first), next(second)
    with pytest.raises(RuntimeError, match="blocks of one thread must nest"):
        next(first, None)
    second.close()
    fp4ext.policy.stages._threads.state.__init__()


CHECKPOINTS = {
    "reentrant": lambda f, t: checkpoint(f, t, use_reentrant=True),
    "non-reentrant": lambda f, t: checkpoint(f, t, use_reentrant=False),
    "nested": lambda f, t: checkpoint(lambda t: checkpoint(f, t, use_reentrant=False), t, use_reentrant=False),
    "nested reentrant": lambda f, t: checkpoint(lambda t: checkpoint(f, t, use_reentrant=True), t, use_reentrant=True),
    "sequential": lambda f, t: checkpoint_sequential([f, f], 2, t, use_reentrant=False),
}


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("outside", STAGES)
@pytest.mark.parametrize("inside", STAGES[1:])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_recomputation_has_its_forwards_stage(kind, inside, outside, thread):
    """Wherever the backward is called, on another thread too, as with a GPU; afterwards all is as before."""
    m, after = seen(), []
    with fp4ext.stage(inside):
        y = CHECKPOINTS[kind](m, x())
    forwards = len(m.stages)

    def backward():
        with fp4ext.stage(outside):
            y.sum().backward()
            after.append(current_stage())

    if thread:
        t = threading.Thread(target=backward)
        t.start()
        t.join()
    else:
        backward()
    assert len(m.stages) > forwards and set(m.stages) == {inside} and after == [outside]
    assert current_stage() == "pretrain"


def test_one_backward_of_two_stages():
    m, n = seen(), seen()
    with fp4ext.stage("rl_trainer"):
        a = checkpoint(m, x(), use_reentrant=False)
    with fp4ext.stage("rl_sampler"):
        b = checkpoint(n, x(), use_reentrant=True)
    (a.sum() + b.sum()).backward()
    assert set(m.stages) == {"rl_trainer"} and set(n.stages) == {"rl_sampler"} and len(m.stages) == len(n.stages) == 2


def test_a_backward_that_fails_leaves_no_stage():
    m = seen()

    def f(t):
        if len(m.stages) == 1:
            raise KeyError
        return m(t)

    with fp4ext.stage("rl_trainer"):
        y = checkpoint(f, x(), use_reentrant=True)
    with pytest.raises(KeyError):
        y.sum().backward()
    m(x())
    assert m.stages == ["rl_trainer", "pretrain"] and current_stage() == "pretrain"


def test_the_users_own_hooks_still_work():
    """Around a stage they go on; within, where they hide it, a recomputation in another stage is refused."""
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    m = seen()
    with hooks, fp4ext.stage("rl_trainer"):
        y = checkpoint(m, x(), use_reentrant=False)
    assert packed
    y.sum().backward()
    assert m.stages == ["rl_trainer"] * 2
    with fp4ext.stage("rl_trainer"), torch.autograd.graph.save_on_cpu():
        y = checkpoint(m, x(), use_reentrant=False)
    with pytest.raises(
        RuntimeError, match="recomputed in a backward in stage 'pretrain', but last ran in 'rl_trainer'"
    ):
        y.sum().backward()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("policy", ["nvidia", "end_to_end"])
def test_gradients_of_a_checkpointed_trainer(policy, reentrant, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    fp4ext.convert(m, policy)
    t = torch.randn(32, 64, requires_grad=True)
    f = torch.compile(m, backend=backend, fullgraph=True) if backend else m

    def gradient(run):
        m.zero_grad()
        with fp4ext.stage("rl_trainer"):
            y = run(t)
        y.square().mean().backward()
        return m[0].weight.grad.clone()

    assert_bytes_equal(gradient(lambda t: checkpoint(f, t, use_reentrant=reentrant)), gradient(m))
    torch._dynamo.reset()


def test_a_stage_inside_compiled_code():
    torch._dynamo.reset()
    m, t = fp4ext.Linear(64, 64), torch.randn(8, 64)

    def f(t):
        with fp4ext.stage("rl_sampler"):
            return m(t)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    assert_bytes_equal(compiled(t).detach(), f(t).detach())
    whole = torch.compile(m, backend="aot_eager", fullgraph=True)
    for name in (*STAGES, *STAGES):
        with fp4ext.stage(name):
            torch.manual_seed(0)
            got = whole(t)
            torch.manual_seed(0)
            assert_bytes_equal(got.detach(), m(t).detach())
    torch._dynamo.reset()
