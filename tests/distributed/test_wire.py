"""FSDP2 with quantized gathers: the bytes of a run that gathers whole weights, for a quarter of what they weigh."""

from functools import partial

import pytest
import torch
from torch import nn

import fp4ext
from fp4ext.errors import Refused
from fp4ext.testing import assert_bytes_equal
from tests.ranks import run

pytestmark = pytest.mark.xdist_group("wire")  # ranks are spawned once for all tests of this file

POLICIES = ["nvidia", "four_over_six", "quartet2", "end_to_end", "mxfp8_backward"]


def model(policy, rows=512):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(256, rows), nn.ReLU(), nn.Linear(rows, 256))
    fp4ext.convert(m, policy)
    return m


def sharded(m, mixed, wire):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    left = fp4ext.distributed.gather_quantized(m) if wire else {}
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
    for layer in (m[0], m[2]):
        fully_shard(layer, **how)
    fully_shard(m, **how)
    return left


def batch(step, rank):
    return torch.randn(4, 16, 256, generator=torch.Generator().manual_seed(100 * step + rank))


def train(rank, policy, mixed, wire, checkpointed=False):
    """Three steps, one accumulates gradients and one clips them, with evaluations in between; then all parameters."""
    m = model(policy)
    left = sharded(m, mixed, wire)
    assert not left, left
    optimizer, out = torch.optim.AdamW(m.parameters(), 1e-2), []
    f = partial(torch.utils.checkpoint.checkpoint, m, use_reentrant=False) if checkpointed else m
    for step in range(3):
        torch.manual_seed(step)
        for part in range(2 if step == 2 else 1):
            loss = f(batch(step + 10 * part, rank)).square().mean()
            loss.backward()
            out.append(loss.detach())
        if step == 1:
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        out += [p.grad.full_tensor() for p in m.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        m.eval()
        with torch.no_grad():
            out.append(m(batch(50, rank)).detach())
        m.train()
    return out + [p.full_tensor().detach().clone() for p in m.parameters()]


def weighed(rank, policy):
    """Bytes that one gather of the first layer sends, by what it is."""
    m = model(policy)
    sharded(m, False, True)
    m(batch(0, rank))
    weight = m[0].weight.to_local()
    parts, _ = weight.fsdp_pre_all_gather(m[0].weight.device_mesh, m[0].weight.shape, (256, 1), m[0], _Plain())
    return sum(t.nbytes for t in parts) / weight.numel()


class _Plain:
    param_dtype = None


def reductions(rank):
    """How often amaxes are reduced in two steps: once per change of the weights."""
    m = model("end_to_end")
    sharded(m, False, True)
    counts, real = [], torch.ops._c10d_functional.all_reduce
    optimizer = torch.optim.SGD(m.parameters(), 1e-2)
    m(batch(0, rank)).square().mean().backward()  # every weight is known after its first gather
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is real.default:
                counts.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        with Count():
            m(batch(0, rank)).square().mean().backward()
    return counts


def saved_state(rank, folder):
    """A checkpoint of a run with quantized gathers, read by one without: both go on alike."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    results = []
    for wire in (True, False):
        m = model("end_to_end")
        sharded(m, False, wire)
        optimizer = torch.optim.AdamW(m.parameters(), 1e-2)
        if wire:
            torch.manual_seed(0)
            m(batch(0, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights, states = get_state_dict(m, optimizer)
        if wire:
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
        else:
            dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
            set_state_dict(m, optimizer, model_state_dict=weights, optim_state_dict=states)
        torch.manual_seed(1)
        m(batch(1, rank)).square().mean().backward()
        optimizer.step()
        results.append([p.full_tensor().detach().clone() for p in m.parameters()])
    return results


def said(rank):
    from torch.distributed.fsdp import fully_shard

    out = []
    for make in (lambda: nn.Linear(4, 4), lambda: fully_shard(model("nvidia")[0])):
        try:
            fp4ext.distributed.gather_quantized(make())
        except Refused as error:
            out.append(str(error))
    m = model("nvidia", rows=48)
    sharded(m, False, True)
    try:  # 48 rows are three tiles, which two ranks cannot share
        m(batch(0, rank))
    except Refused as error:
        out.append(str(error))
    m = model("end_to_end")
    sharded(m, False, True)
    fp4ext.convert(m, "bf16")
    try:
        m(batch(0, rank))
    except Refused as error:
        out.append(str(error))
    return out


def left_alone(rank):
    """Layers whose column-wise copy is another rounding are gathered whole, and said so."""
    m = model("mxfp8")
    left = sharded(m, False, True)
    m(batch(0, rank)).square().mean().backward()
    return left


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    programs = {}
    for wire in (False, True):
        programs["end_to_end", False, wire] = partial(train, policy="end_to_end", mixed=False, wire=wire)
        programs["checkpointed", wire] = partial(train, policy="end_to_end", mixed=False, wire=wire, checkpointed=True)
    programs |= {("bytes", policy): partial(weighed, policy=policy) for policy in POLICIES}
    programs["reductions"] = reductions
    programs["state"] = partial(saved_state, folder=str(tmp_path_factory.mktemp("state")))
    programs |= {"said": said, "left": left_alone}
    return run(programs, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    ways = [(policy, mixed, wire) for policy in POLICIES for mixed in (False, True) for wire in (False, True)]
    programs = {way: partial(train, policy=way[0], mixed=way[1], wire=way[2]) for way in ways}
    return run(programs, 2, tmp_path_factory.mktemp("trained"))


def test_the_bytes_of_a_whole_gather(two):
    check_bytes(two, "end_to_end", False)


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_bytes_of_whole_gathers(policy, mixed, trained):
    check_bytes(trained, policy, mixed)


def check_bytes(ranks, policy, mixed):
    for rank in ranks:
        for a, b in zip(rank[policy, mixed, True], rank[policy, mixed, False], strict=True):
            assert_bytes_equal(a, b)


def test_under_checkpointing(two):
    for rank in two:
        for a, b in zip(rank["checkpointed", True], rank["checkpointed", False], strict=True):
            assert_bytes_equal(a, b)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_travels(policy, two):
    """4.5 bits per element and one outer scale: at most 0.30 of BF16's 2 bytes."""
    assert two[0]["bytes", policy] <= 0.30 * 2


def test_amaxes_are_reduced_together(two):
    assert two[0]["reductions"] == [2, 2]


def test_checkpoints_hold_plain_weights(two):
    for rank in two:
        for a, b in zip(*rank["state"], strict=True):
            assert_bytes_equal(a, b)


def test_what_is_refused(two):
    for rank in two:
        none, sharded_already, uneven, other = rank["said"]
        assert "no converted linear layer" in none and "is sharded" in sharded_already
        assert "48 rows, over 2 ranks" in uneven and "gathered as" in other


def test_what_cannot_is_said(two):
    assert set(two[0]["left"]) == {"0", "2"}
    assert all("dgrad quantizes the unrounded weight" in why for why in two[0]["left"].values())
