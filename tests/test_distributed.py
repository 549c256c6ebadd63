"""Processes: DDP, FSDP2 and HSDP on converted models, dense and mixtures, eager and compiled.

Their gradients are the mean of the ranks' own, byte for byte; the noise of a mean over ranks falls with the ranks.

tests/nn/test_sharded.py has tensor parallel and its product with FSDP2, tests/distributed/ has expert parallel and
quantized gathers.
"""

from functools import partial

import pytest
import torch
from torch import nn

import fp4ext
from fp4ext.functional.grouped import expert_ends
from fp4ext.testing import assert_bytes_equal
from tests.ranks import run

pytestmark = pytest.mark.xdist_group("distributed")  # ranks are spawned once for all tests of this file

POLICIES = ["bf16", "nvidia", "end_to_end"]


class Mixture(nn.Module):
    """Each token to its best expert, weighted by the router."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(64, 4), fp4ext.Experts(4, 64, 32, policy="bf16")

    def forward(self, x):
        weight, expert = self.router(x).softmax(-1).max(-1)
        expert, order = expert.sort()
        y = self.experts(x[order], expert_ends(expert, 4))
        return x + torch.zeros_like(x).index_copy(0, order, y) * weight[:, None]


def model(policy, kind):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Mixture() if kind == "mixture" else nn.Linear(64, 64))
    fp4ext.convert(m, policy)
    return m


def gradients(m, rank, f=None):
    """Of one rank's batch, under the seed that all ranks have."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 + rank))
    torch.manual_seed(1)
    (m if f is None else f)(x).square().mean().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in m.parameters()]


def on_ranks(rank, wrap, policy, kind, compiled):
    from torch.distributed.fsdp import fully_shard

    m = model(policy, kind)
    if wrap == "ddp":
        m = nn.parallel.DistributedDataParallel(m)
    else:
        for layer in (m[0], m[2]):
            fully_shard(layer)
        fully_shard(m)
    return gradients(m, rank, torch.compile(m) if compiled else None)


CASES = {
    (wrap, policy, kind, compiled): partial(on_ranks, wrap=wrap, policy=policy, kind=kind, compiled=compiled)
    for wrap in ("ddp", "fsdp2")
    for policy in POLICIES
    for kind in ("dense", "mixture")
    for compiled in (False, True)
}


SLOW = {case: program for case, program in CASES.items() if case[3]}  # compiling takes most of the time
QUICK = {case: program for case, program in CASES.items() if case not in SLOW}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return run(QUICK, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return run(SLOW, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("wrap", "policy", "kind", "compiled"), QUICK)
def test_gradients_are_the_mean_of_the_ranks(wrap, policy, kind, compiled, quick):
    check_mean(wrap, policy, kind, compiled, quick)


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "policy", "kind", "compiled"), SLOW)
def test_compiled_gradients_are_the_mean_of_the_ranks(wrap, policy, kind, compiled, slow):
    check_mean(wrap, policy, kind, compiled, slow)


def check_mean(wrap, policy, kind, compiled, two):
    ranks = []
    for rank in range(2):
        fp4ext.set_draw_rank(rank)
        ranks.append(gradients(model(policy, kind), rank))
    fp4ext.set_draw_rank(None)
    for rank in range(2):
        got = two[rank][wrap, policy, kind, compiled]
        for a, *parts in zip(got, *ranks, strict=True):
            wanted = (parts[0] + parts[1]) / 2
            if compiled:  # inductor adds up what is not fp4ext's, such as the loss and the ReLU, in an order of its own
                assert torch.allclose(a, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
            else:
                assert_bytes_equal(a, wanted)


def on_replicas(rank, policy, kind):
    """HSDP: sharded over pairs of ranks, replicated over the two pairs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    m = model(policy, kind)
    for layer in (m[0], m[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(m, mesh=mesh)
    return gradients(m, rank)


@pytest.mark.slow
def test_sharded_replicas(tmp_path):
    """Each gradient is the mean of the four ranks' own, byte for byte: pairs are added first."""
    cases = [(policy, kind) for policy in POLICIES for kind in ("dense", "mixture")]
    four = run({case: partial(on_replicas, policy=case[0], kind=case[1]) for case in cases}, 4, tmp_path)
    for policy, kind in cases:
        ranks = []
        for rank in range(4):
            fp4ext.set_draw_rank(rank)
            ranks.append(gradients(model(policy, kind), rank))
        fp4ext.set_draw_rank(None)
        for got in four:
            for a, r0, r1, r2, r3 in zip(got[policy, kind], *ranks, strict=True):
                assert_bytes_equal(a, ((r0 + r1) + (r2 + r3)) / 4, f"{policy} {kind}")


@pytest.mark.parametrize("policy", ["nvidia", "quartet2", "end_to_end"])
def test_noise_of_the_mean_over_ranks(policy):
    """16 ranks with one seed and one batch: their errors are independent, so the mean's energy is a 16th of one's.

    16 trials of 64·64 elements under signs in common within a draw: the ratio's own deviation is below 0.3 of it, so
    0.04 … 0.1 is ± 2 of them; with states in common it would be near 1.
    """
    m = fp4ext.Linear(64, 64, bias=False, policy=policy)
    x, dy = torch.randn(64, 64), torch.randn(64, 64)

    def gradient(rank, seed):
        fp4ext.set_draw_rank(rank)
        torch.manual_seed(seed)
        return torch.autograd.grad(m(x), m.weight, dy)[0].double()

    draws = torch.stack([torch.stack([gradient(rank, seed) for rank in range(16)]) for seed in range(16)])
    fp4ext.set_draw_rank(None)
    mean = draws.mean((0, 1))
    one = (draws - mean).square().sum((-1, -2)).mean()
    of_ranks = (draws.mean(1) - mean).square().sum((-1, -2)).mean()
    assert 0.04 < of_ranks / one < 0.1


def test_a_rank_that_is_none():
    for bad in (-1, True, 1.0, "0"):
        with pytest.raises(ValueError, match="accepted: a whole number from 0, or None"):
            fp4ext.set_draw_rank(bad)
