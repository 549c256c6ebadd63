"""Layers that fully_shard has given a class of its own: converted, converted anew and reverted beneath it."""

import pytest
import torch
from torch import nn

import fp4ext
from fp4ext.conversion.wrapped import class_of
from fp4ext.testing import assert_bytes_equal
from tests.ranks import run

pytestmark = pytest.mark.xdist_group("wrapped")  # ranks are spawned once for all tests of this file


def sharded(convert_first):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), fp4ext.Experts(2, 64, 32, policy="bf16"), nn.Linear(64, 64))
    if convert_first:
        fp4ext.convert(m, "end_to_end")
    for layer in (m[0], m[2], m[3]):
        fully_shard(layer)
    fully_shard(m)
    if not convert_first:
        assert sorted(fp4ext.convert(m, "end_to_end").converted) == ["0", "2", "3"]
    return m


def gradients(m, rank):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(1)
    h = m[1](m[0](x))
    y = m[3](m[2](h, torch.tensor([7, 16], dtype=torch.int32)))
    y.square().mean().backward()
    return [p.grad.full_tensor() for p in m.parameters()]


def both_orders(rank):
    return gradients(sharded(True), rank), gradients(sharded(False), rank)


def there_and_back(rank):
    m = sharded(True)
    classes = [class_of(m[0]).__name__]
    again = sorted(fp4ext.convert(m, "nvidia").converted)
    policies = [m[0].policy.name, m[2].policy.name]
    with pytest.raises(ValueError, match="is sharded over"):
        fp4ext.pack(m)
    reverted = sorted(fp4ext.revert(m))
    classes.append(class_of(m[0]).__name__)
    return classes, again, policies, reverted, type(m[0]).__name__, hasattr(m[0], "reshard")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run({"orders": both_orders, "back": there_and_back}, 2, tmp_path_factory.mktemp("two"))


def test_either_order_gives_the_same_gradients(two):
    for rank in two:
        for a, b in zip(*rank["orders"], strict=True):
            assert_bytes_equal(a, b)


def test_there_and_back(two):
    for rank in two:
        classes, again, policies, reverted, name, is_sharded = rank["back"]
        assert classes == ["Linear", "Linear"] and again == reverted == ["0", "2", "3"]
        assert policies == ["nvidia", "nvidia"] and name == "FSDPLinear" and is_sharded
