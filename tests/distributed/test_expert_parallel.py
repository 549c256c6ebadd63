"""Experts on several ranks: what one process computes for the tokens of all, and the same noise where it is random."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp4ext
from fp4ext.errors import Refused
from fp4ext.testing import assert_bytes_equal
from tests.ranks import run

pytestmark = pytest.mark.xdist_group("expert_parallel")  # ranks are spawned once for all tests of this file

EXPERTS, FEATURES, HIDDEN, PAST = 4, 64, 32, 2
POLICIES = ["bf16", "mxfp8", "nvidia", "end_to_end"]
DETERMINISTIC = {"bf16", "mxfp8"}


def counts(rank):
    """Tokens of one rank by expert: an expert without any on one rank, none at all on rank 3."""
    return [0, 0, 0, 0] if rank == 3 else [37 + rank, 0 if rank == 0 else 9, 50, 33 + 2 * rank]


def tokens(rank):
    """x with rows past the last expert, which hold NaN, and offsets."""
    n = counts(rank)
    x = torch.randn(sum(n) + PAST, FEATURES, generator=torch.Generator().manual_seed(50 + rank))
    x[sum(n) :] = float("nan")
    return x, torch.tensor(n).cumsum(0).to(torch.int32)


def experts(policy):
    torch.manual_seed(0)
    return fp4ext.Experts(EXPERTS, FEATURES, HIDDEN, policy=policy)


def mesh_of(*sizes, names=None):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def parallel(m, mesh):
    from torch.distributed.tensor.parallel import parallelize_module

    from fp4ext.distributed.expert_parallel import ExpertParallel

    return parallelize_module(m, mesh, ExpertParallel())


def step(m, rank):
    x, offsets = tokens(rank)
    x.requires_grad_()
    torch.manual_seed(1)
    y = m(x, offsets)
    y.square().sum().backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in m.parameters()]
    return [y.detach(), x.grad, *grads]


def on_ranks(rank, policy):
    return step(parallel(experts(policy), mesh_of(dist.get_world_size())), rank)


def without_gradients(rank):
    """Two calls under no_grad, then one that is checkpointed: an exchange leaves nothing behind."""
    m = parallel(experts("end_to_end"), mesh_of(dist.get_world_size()))
    x, offsets = tokens(rank)
    with torch.no_grad():
        a, b = m(x, offsets), m(x, offsets)
    torch.manual_seed(1)
    y = torch.utils.checkpoint.checkpoint(m, x.requires_grad_(), offsets, use_reentrant=False)
    y.square().sum().backward()
    return [a, b, y.detach(), *(p.grad.full_tensor() for p in m.parameters())]


def replicas_of_experts(rank, policy):
    """Two replicas, each with its experts on two ranks, under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(2, 2, names=("dp", "ep"))
    m = parallel(experts(policy), mesh["ep"])
    fully_shard(m, mesh=mesh["dp"])
    return step(m, rank)


def said(rank):
    out = []
    for module, mesh in (
        (nn.Linear(4, 4), mesh_of(2)),
        (fp4ext.Experts(3, 16, 16), mesh_of(2)),
        (experts("bf16"), mesh_of(2, 1, names=("a", "b"))),
    ):
        try:
            parallel(module, mesh)
        except (Refused, ValueError) as error:
            out.append(str(error))
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    programs = {policy: partial(on_ranks, policy=policy) for policy in POLICIES}
    programs |= {"without gradients": without_gradients, "said": said}
    return run(programs, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    programs = {policy: partial(on_ranks, policy=policy) for policy in ("mxfp8", "end_to_end")}
    programs["fsdp"] = partial(replicas_of_experts, policy="mxfp8")
    return run(programs, 4, tmp_path_factory.mktemp("four"))


def one_process(policy, ranks):
    """(y, dx) of each rank in `ranks`, and the gradients of the stacks, for the tokens of all in one call."""
    order = [(rank, counts(rank), e) for e in range(EXPERTS) for rank in ranks]
    parts = [(rank, sum(n[:e]), n[e]) for rank, n, e in order]
    x = torch.cat([tokens(rank)[0][start : start + size] for rank, start, size in parts]).requires_grad_()
    ends = torch.tensor([sum(counts(rank)[e] for rank in ranks) for e in range(EXPERTS)]).cumsum(0).to(torch.int32)
    m = experts(policy)
    torch.manual_seed(1)
    y = m(x, ends)
    y.square().sum().backward()
    out = {rank: [torch.zeros(sum(counts(rank)) + PAST, FEATURES) for _ in range(2)] for rank in ranks}
    at = 0
    for rank, start, size in parts:
        for whole, target in zip((y.detach(), x.grad), out[rank], strict=True):
            target[start : start + size] = whole[at : at + size]
        at += size
    return out, [p.grad for p in m.parameters()]


def compare(policy, got):
    """Deterministic products are one process's to the byte; random ones are as far from the exact gradient."""
    ranks = range(len(got))
    by_rank, gradients = one_process(policy, ranks)
    for rank in ranks:
        y, dx, *dw = got[rank]
        assert_bytes_equal(y, by_rank[rank][0])
        if policy in DETERMINISTIC:
            assert_bytes_equal(dx, by_rank[rank][1])
            for a, b in zip(dw, gradients, strict=True):
                assert_bytes_equal(a, b)
    if policy not in DETERMINISTIC:
        exact = one_process("bf16", ranks)[1]
        for a, b, c in zip(got[0][2:], gradients, exact, strict=True):
            # Errors of two draws of thousands of elements: their norms differ by a few per cent.
            assert 0.85 < ((a - c).norm() / (b - c).norm()).item() < 1.15


@pytest.mark.parametrize("policy", POLICIES)
def test_on_two_ranks(policy, two):
    compare(policy, [rank[policy] for rank in two])


@pytest.mark.parametrize("policy", ["mxfp8", "end_to_end"])
def test_on_four_ranks_one_without_tokens(policy, four):
    compare(policy, [rank[policy] for rank in four])


def test_replicas_under_fsdp(four):
    """Ranks 0, 1 and 2, 3 are replicas; FSDP2 averages their gradients."""
    halves = [one_process("mxfp8", pair) for pair in ((0, 1), (2, 3))]
    mean = [(a + b) / 2 for a, b in zip(halves[0][1], halves[1][1], strict=True)]
    for rank, got in enumerate(four):
        y, dx, *dw = got["fsdp"]
        assert_bytes_equal(y, halves[rank // 2][0][rank][0])
        assert_bytes_equal(dx, halves[rank // 2][0][rank][1])
        for a, b in zip(dw, mean, strict=True):
            assert_bytes_equal(a, b)


def test_nothing_is_left_of_a_call(two):
    for rank in two:
        a, b, y, *gradients = rank["without gradients"]
        assert_bytes_equal(a, b)
        assert_bytes_equal(a, y)
        for got, wanted in zip(gradients, rank["end_to_end"][2:], strict=True):
            assert_bytes_equal(got, wanted)


def test_what_is_refused(two):
    for rank in two:
        linear, three, flat = rank["said"]
        assert "accepted: fp4ext.Experts" in linear and "for 3 experts" in three and "2 dimensions" in flat
