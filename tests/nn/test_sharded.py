"""Tensor parallel, data parallel by DTensor and FSDP2 × tensor parallel: the bytes and the numbers of one process.

test_the_codes_of_the_whole is the contract: with amaxes shared, each rank's codes and scales are those of its part of
the whole matrix. So gradients differ from one process's by the order of sums alone: over ranks where a contraction is
cut, and in the loss. K ≤ 512 products are added in another order, an error of at most 512·2⁻²⁴ = 3e-5 of Σ|terms|;
that is CLOSE for results of one product. In later products such an error moves a stochastically rounded code with a
probability of about 3e-5 / (a step of the code), and one code of the 65,536 of a gradient is about 2e-3 of its norm:
ONE_CODE is for gradients behind another layer. Other random bits, or amaxes of their own, change a gradient by 0.1
and more.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp4ext
from fp4ext.nn.shards import Shard, share_amax
from fp4ext.policy import Spec
from fp4ext.testing import assert_bytes_equal
from tests.ranks import run

pytestmark = pytest.mark.xdist_group("sharded")  # ranks are spawned once for all tests of this file

POLICIES = ["bf16", "mxfp8", "nvidia", "four_over_six", "quartet2", "end_to_end"]
CLOSE, ONE_CODE = 3e-5, 5e-3


class Block(nn.Module):
    """A norm, and two linear layers with a residual: what column- and row-wise styles are for."""

    def __init__(self, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 512, bias=bias), nn.Linear(512, 256, bias=bias)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def block(policy, bias=True):
    torch.manual_seed(0)
    m = Block(bias)
    fp4ext.convert(m, policy)
    return m


def batch(rank=0):
    return torch.randn(8, 32, 256, generator=torch.Generator().manual_seed(100 + rank))


def step(m, x, f=None):
    """Loss's gradients after one step under a seed: of the input, then of the parameters, all whole."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = (m if f is None else f)(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(whole(p.grad) for p in m.parameters())]


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def tensor_parallel(m, mesh, sequence=False):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    if not sequence:
        return parallelize_module(m, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    m = parallelize_module(m, mesh, plan)
    return parallelize_module(m, mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()))


def mesh_of(*sizes, names=None):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def tp(rank, policy, bias=True, compiled=False, shared=True, sequence=False):
    m = block(policy, bias)
    tensor_parallel(m, mesh_of(dist.get_world_size()), sequence)
    f = torch.compile(m, fullgraph=True) if compiled else None
    with share_amax(shared):
        return step(m, batch(), f)


def dtensor_batch(rank, policy):
    """Data parallel by DTensor: the tokens cut, the weights whole."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    mesh = mesh_of(dist.get_world_size())
    m = distribute_module(block(policy).up, mesh)
    x = distribute_tensor(batch(), mesh, [Shard(0)]).requires_grad_()
    torch.manual_seed(1)
    with share_amax():
        y = m(x)
        y.square().mean().backward()
    assert y.placements == (Shard(0),) and m.weight.placements == (Replicate(),)
    return [whole(t) for t in (y.detach(), x.grad, m.weight.grad, m.bias.grad)]


def uneven(rank, policy):
    """A width that two ranks share unequally, in blocks that the cut divides."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(72, 100), nn.Linear(100, 40))
    fp4ext.convert(m, policy, filter=lambda name, module: True)
    parallelize_module(m, mesh_of(dist.get_world_size()), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    x = torch.randn(8, 72, generator=torch.Generator().manual_seed(2)).requires_grad_()
    y = m(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(whole(p.grad) for p in m.parameters())]


def refused(rank):
    """What a placement or a plain tensor beside a DTensor is told."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, said = mesh_of(dist.get_world_size()), []
    place = lambda *p: DTensor.from_local(torch.ones(32, 32), mesh, p, run_check=False)  # noqa: E731
    recipe = fp4ext.policies.get("nvidia").recipes("m", 0)["pretrain"]
    for x, w in (
        (torch.ones(32, 32), place(Replicate())),
        (place(Replicate()), torch.ones(32, 32)),
        (place(Replicate()), place(Partial())),
    ):
        try:
            fp4ext.linear(x, w, None, recipe)
        except fp4ext.errors.Refused as error:
            said.append(str(error))
    # A partial x is summed before it is quantized.
    summed = fp4ext.linear(place(Partial()), place(Shard(0)), None, recipe).full_tensor()
    return said, summed


SPECS = [
    "nvfp4",
    "nvfp4/four_over_six",
    "nvfp4/sweep/nearest/1x16/row",
    "nvfp4/amax/nearest/16x16",
    "nvfp4/amax/stochastic/1x16/tensor/16",
    "nvfp4/minvar/stochastic/1x16/tensor/128x2",
    "nvfp4/amax/eden/1x16/tensor/128",
    "nvfp4/sweep/eden/1x16/row/128x2",
    "mxfp8/ceil/stochastic",
    "mxfp4/ceil/stochastic/1x32/none/128",
]


def matrix():
    """[256, 512], whose parts have amaxes that differ tenfold."""
    gains = torch.tensor([1.0, 10.0])
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(3))
    return x * gains.repeat_interleave(128)[:, None] * gains.flip(0).repeat_interleave(256)


def codes(rank):
    """(spec, cut, axis) → this rank's codes, block scales and outer scale."""
    ranks, out = dist.get_world_size(), {}
    groups = (dist.group.WORLD.group_name,)
    for key in SPECS:
        for cut in (0, 1):
            part = matrix().chunk(ranks, cut)[rank].contiguous()
            at = [0, 0]
            at[cut] = rank * part.shape[cut]
            shard = Shard(*at, *((groups, ()) if cut == 0 else ((), groups)), shares_amax=True)
            for axis in (-1, -2):
                q = shard.quantize(part, Spec.parse(key), axis, torch.tensor([7, 8]), "dy")
                out[key, cut, axis] = q.codes, q.scales, q.global_scale
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    programs = {("tp", policy): partial(tp, policy=policy) for policy in POLICIES}
    programs |= {("no bias", "end_to_end"): partial(tp, policy="end_to_end", bias=False)}
    programs |= {("sequence", policy): partial(tp, policy=policy, sequence=True) for policy in ("nvidia", "end_to_end")}
    programs |= {("own amax", policy): partial(tp, policy=policy, shared=False) for policy in ("nvidia", "end_to_end")}
    programs |= {("batch", policy): partial(dtensor_batch, policy=policy) for policy in ("nvidia", "end_to_end")}
    programs |= {("uneven", policy): partial(uneven, policy=policy) for policy in ("nvidia", "end_to_end")}
    return run(programs | {"refused": refused, "codes": codes}, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def two_compiled(tmp_path_factory):
    programs = {policy: partial(tp, policy=policy, compiled=True) for policy in ("nvidia", "end_to_end")}
    return run(programs, 2, tmp_path_factory.mktemp("compiled"))


def one_process(policy, bias=True):
    fp4ext.set_draw_rank(0)
    try:
        return step(block(policy, bias), batch())
    finally:
        fp4ext.set_draw_rank(None)


def distances(got, wanted):
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, wanted, strict=True)]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("key", SPECS)
def test_the_codes_of_the_whole(key, cut, axis, two):
    whole = fp4ext.quantize(matrix(), Spec.parse(key), axis=axis, rng=torch.tensor([7, 8]), role="dy")
    dim = cut if axis == -1 else 1 - cut
    for rank, got in enumerate(two):
        c, scales, outer = got["codes"][key, cut, axis]
        assert_bytes_equal(c.view(torch.uint8), whole.codes.view(torch.uint8).chunk(2, dim)[rank])
        assert_bytes_equal(scales.view(torch.uint8), whole.scales.view(torch.uint8).chunk(2, dim)[rank])
        if outer is not None:
            rows = outer.dim() > 0 and outer.numel() > 1 and dim == 0
            assert_bytes_equal(outer, whole.global_scale.chunk(2, 0)[rank] if rows else whole.global_scale)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["tp", "no bias", "sequence"])
def test_the_numbers_of_one_process(way, policy, two):
    if (way, policy) not in two[0]:
        pytest.skip(f"{way} runs for policies that differ in kind")
    wanted = one_process(policy, bias=way != "no bias")
    for rank in two:
        y, *gradients = distances(rank[way, policy], wanted)
        assert y < CLOSE and max(gradients) < ONE_CODE


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["nvidia", "end_to_end"])
def test_compiled_the_numbers_of_one_process(policy, two_compiled):
    wanted = one_process(policy)
    for rank in two_compiled:
        y, *gradients = distances(rank[policy], wanted)
        assert y < CLOSE and max(gradients) < ONE_CODE


@pytest.mark.parametrize("policy", ["nvidia", "end_to_end"])
def test_a_changed_code_is_seen(policy, two):
    """Own amaxes change codes, and stand far above the tolerance."""
    wanted = one_process(policy)
    own = distances(two[0]["own amax", policy], wanted)
    assert 10 * ONE_CODE < max(own) < 0.3  # the same numbers with another rounding


@pytest.mark.parametrize("policy", ["nvidia", "end_to_end"])
def test_a_batch_that_is_cut(policy, two):
    fp4ext.set_draw_rank(0)
    m, x = block(policy).up, batch().requires_grad_()
    torch.manual_seed(1)
    y = m(x)
    y.square().mean().backward()
    fp4ext.set_draw_rank(None)
    for rank in two:
        assert max(distances(rank["batch", policy], [y, x.grad, m.weight.grad, m.bias.grad])) < CLOSE


@pytest.mark.parametrize("policy", ["nvidia", "end_to_end"])
def test_any_width_is_taken(policy, two):
    """Blocks that a cut divides are other blocks, so the numbers are near those of the plain layers, not equal."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(72, 100), nn.Linear(100, 40))
    x = torch.randn(8, 72, generator=torch.Generator().manual_seed(2)).requires_grad_()
    y = m(x)
    y.square().mean().backward()
    for rank in two:
        assert max(distances(rank["uneven", policy], [y, x.grad, *(p.grad for p in m.parameters())])) < 0.5


def test_what_is_refused(two):
    for rank in two:
        said, summed = rank["refused"]
        assert ["plain tensor" in said[0], "plain tensor" in said[1], "placed as" in said[2]] == [True] * 3
        assert summed.shape == (32, 64) and (summed == 64).all()


# Four processes: FSDP2 over one dimension of the mesh, tensor parallel over the other --------------------------------


def two_by_two(rank, policy, compiled=False):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(2, 2, names=("dp", "tp"))
    m = block(policy)
    tensor_parallel(m, mesh["tp"])
    for layer in (m.up, m.down):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(m, mesh=mesh["dp"])
    f = torch.compile(m) if compiled else None
    with share_amax():
        return step(m, batch(mesh["dp"].get_local_rank()), f)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    programs = {policy: partial(two_by_two, policy=policy) for policy in ("bf16", "nvidia", "end_to_end")}
    programs["compiled"] = partial(two_by_two, policy="end_to_end", compiled=True)
    return run(programs, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "nvidia", "end_to_end", "compiled"])
def test_gradients_are_the_mean_over_replicas(name, four):
    """The replicas are ranks 0, 1 and 2, 3; each draws as its first rank."""
    policy = "end_to_end" if name == "compiled" else name
    replicas = []
    for replica in range(2):
        fp4ext.set_draw_rank(2 * replica)
        replicas.append(step(block(policy), batch(replica)))
    fp4ext.set_draw_rank(None)
    for rank, got in enumerate(four):
        mine = replicas[rank // 2]
        wanted = [*mine[:2], *((a + b) / 2 for a, b in zip(replicas[0][2:], replicas[1][2:], strict=True))]
        y, *gradients = distances(got[name], wanted)
        assert y < CLOSE and max(gradients) < ONE_CODE
