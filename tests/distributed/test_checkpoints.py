"""torch.distributed.checkpoint: saved on four processes, resumed on four, two and one, with quantized gathers or not.

After a resume the weights and the optimizer's states are those that were saved, byte for byte, whatever the number of
processes. The next step's forward then has the same codes, since a weight's outer scale is that of the whole; the
losses are compared on one batch that every rank has.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp4ext
from fp4ext.testing import assert_bytes_equal
from tests.ranks import run

# Ranks are spawned once for all tests of this file.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("checkpoints")]


def sharded(wire):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    fp4ext.convert(m, "end_to_end")
    if wire:
        fp4ext.distributed.gather_quantized(m)
    for layer in (m[0], m[2]):
        fully_shard(layer)
    fully_shard(m)
    return m, torch.optim.AdamW(m.parameters(), 1e-2)


def step(m, optimizer, seed):
    torch.manual_seed(seed)
    loss = m(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def whole_state(m, optimizer):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    weights, states = get_state_dict(m, optimizer, options=options)
    flat = {f"model.{name}": t for name, t in weights.items()}
    for name, state in states["state"].items():
        flat |= {f"{name}.{key}": t for key, t in state.items()}
    return {name: t.clone() for name, t in flat.items()}  # of one process they are the parameters themselves


def save(rank, folder, wire):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    m, optimizer = sharded(wire)
    for seed in range(2):
        step(m, optimizer, seed)
    weights, states = get_state_dict(m, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return whole_state(m, optimizer), step(m, optimizer, 7)


def resume(rank, folder, wire):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    m, optimizer = sharded(wire)
    step(m, optimizer, 5)  # other weights, which the checkpoint replaces
    weights, states = get_state_dict(m, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(m, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert dist.get_world_size() == len(dist.get_process_group_ranks(dist.group.WORLD))
    return whole_state(m, optimizer), step(m, optimizer, 7)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Number of ranks → (wire when saved, wire when resumed) → what rank 0 has."""
    folders = {wire: str(tmp_path_factory.mktemp("checkpoint")) for wire in (False, True)}
    saved = {wire: partial(save, folder=folders[wire], wire=wire) for wire in (False, True)}
    resumed = {(a, b): partial(resume, folder=folders[a], wire=b) for a in (False, True) for b in (False, True)}
    out = {"saved": run(saved, 4, tmp_path_factory.mktemp("four"))[0]}
    for world in (4, 2, 1):
        out[world] = run(resumed, world, tmp_path_factory.mktemp("ranks"))[0]
    return out


@pytest.mark.parametrize("wires", [(a, b) for a in (False, True) for b in (False, True)])
@pytest.mark.parametrize("world", [4, 2, 1])
def test_the_run_goes_on(world, wires, runs):
    state, loss = runs[world][wires]
    wanted, wanted_loss = runs["saved"][wires[0]]
    assert state.keys() == wanted.keys()
    for name, t in wanted.items():
        assert_bytes_equal(state[name], t, name)
    assert_bytes_equal(loss, wanted_loss)
