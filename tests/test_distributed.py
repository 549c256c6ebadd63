"""Two processes: data parallel and FSDP2 on converted models. The noise of a mean over ranks falls with the ranks."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import fp4ext
from fp4ext.testing import assert_bytes_equal

WORLD = 2


def model(policy):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    fp4ext.convert(m, policy)
    return m


def batch(rank):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(100 + rank))


def gradients(m, rank):
    """Of one rank's batch, under the seed that all ranks have."""
    torch.manual_seed(1)
    m(batch(rank)).square().mean().backward()
    return [p.grad for p in m.parameters()]


def work(rank, port, wrap, policy, out):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    m = model(policy)
    if wrap == "ddp":
        m = nn.parallel.DistributedDataParallel(m)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in m:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(m)
    got = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients(m, rank)]
    torch.save(got, f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("policy", ["nvidia", "end_to_end"])
def test_gradients_are_the_mean_of_the_ranks(wrap, policy, tmp_path, unused_port):
    mp.spawn(work, (unused_port, wrap, policy, tmp_path), nprocs=WORLD)
    ranks = []
    for rank in range(WORLD):
        fp4ext.set_draw_rank(rank)
        ranks.append(gradients(model(policy), rank))
    fp4ext.set_draw_rank(None)
    for rank in range(WORLD):
        for got, *parts in zip(torch.load(tmp_path / f"{rank}.pt"), *ranks, strict=True):
            assert_bytes_equal(got, (parts[0] + parts[1]) / 2)


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


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
