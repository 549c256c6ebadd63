"""The CUDA quantizers of experts on the SIMT machine: one launch for all, the bytes of the CPU's grouped ops."""

import itertools

import pytest
import torch

from fp4ext.testing import assert_bytes_equal, assert_same_quantized, generate

from .test_quantize import KEYS, SHARD, full

OFFSETS = [[130, 130, 161, 161, 240], [0, 0, 16], [5], [0, 0]]
RHTS = full("nvfp4/sweep/eden/1x16/row/128x2", "nvfp4/amax/nearest/1x16/tensor/64", "mxfp8/ceil/nearest/1x32/none/128")


def check(simt, x, offsets, key, axis, rng=SHARD):
    (key,) = full(key)
    ends = torch.tensor(offsets, dtype=torch.int32)
    wanted = torch.ops.fp4ext.grouped_quantize(x, ends, key, axis, rng, 1)
    got = simt.ops.grouped_quantize(x, ends, key, axis, rng, 1)
    assert_same_quantized(got, wanted, f"{key} axis={axis} {offsets}")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_equal_the_cpu(simt, key, offsets):
    """Experts with more rows than a tile, with less than a block, with none; unassigned rows; gains far apart."""
    simt.configure(seed=len(offsets), asynchronous=simt.MODES[len(offsets) % 3])
    for cols, axis in itertools.product((48, 133), (-1, -2)):
        x = generate("student_t3", offsets[-1] + 3, cols, seed=3, dtype=(torch.bfloat16, torch.float32)[cols % 2])
        start = 0
        for e, end in enumerate(offsets):
            x[start:end] *= 100.0 ** (e % 3 - 1)
            start = end
        x[start:] = torch.nan
        check(simt, x, offsets, key, axis)


@pytest.mark.parametrize("key", RHTS)
def test_the_rotation_of_each_expert_has_its_own_length(simt, key):
    """Tokens 128, 64, 96, 30 (padded to 32) and 7: n is 128, 64, 32, 32 and 16."""
    offsets = [128, 192, 288, 318, 325]
    check(simt, generate("outliers30", 325, 20, seed=4), offsets, key, -2)
    check(simt, generate("outliers30", 325, 96, seed=4), offsets, key, -1)


@pytest.mark.parametrize("key", [KEYS[0], KEYS[3], KEYS[5], KEYS[7]])
def test_stored(simt, key):
    """From codes and scales of the experts' other direction: requantized on the fly."""
    offsets = [33, 33, 100]
    ends = torch.tensor(offsets, dtype=torch.int32)
    x = generate("student_t3", 104, 70, seed=12)
    for stored in full("nvfp4/sweep", "mxfp8"):
        q = torch.ops.fp4ext.grouped_quantize(x, ends, stored, -1, None, 0)
        for axis in (-1, -2):
            args = *q, stored.split("/")[0], 70, ends, key, axis, SHARD, 1
            wanted, got = torch.ops.fp4ext.grouped_requantize(*args), simt.ops.grouped_requantize(*args)
            assert_same_quantized(got, wanted, f"{stored} → {key}")


@pytest.mark.parametrize("offsets", [*OFFSETS, [128, 256, 257], [0, 3, 131]], ids=str)
def test_swizzle(simt, offsets):
    """Scales in the tensor cores' layout, each expert's rows padded on their own: the bytes of the CPU's op."""
    ends = torch.tensor(offsets, dtype=torch.int32)
    for columns in (1, 4, 7):
        scales = torch.randint(1, 256, (offsets[-1] + 3, columns), generator=torch.Generator().manual_seed(columns))
        scales = scales.to(torch.uint8)
        wanted = torch.ops.fp4ext.swizzle(scales, ends)
        assert_bytes_equal(simt.ops.swizzle(scales, ends), wanted, f"{offsets} {columns}")
    for lie, as_if in (([offsets[-1] + 9] * 2, [offsets[-1] + 3] * 2), ([-5, 3, 2], [0, 3, 3])):
        lie, as_if = (torch.tensor(o, dtype=torch.int32) for o in (lie, as_if))
        assert_bytes_equal(simt.ops.swizzle(scales, lie), torch.ops.fp4ext.swizzle(scales, as_if), f"{lie}")


def test_offsets_that_lie_do_no_harm(simt):
    """They are read on the device, where nothing can raise: clamped into the rows there are."""
    x = generate("gaussian", 40, 32, seed=1)
    for offsets, as_if in (([50, 10, 60], [40, 40, 40]), ([-5, 8, 7], [0, 8, 8])):
        for axis in (-1, -2):
            got, wanted = (
                simt.ops.grouped_quantize(x, torch.tensor(o, dtype=torch.int32), KEYS[0], axis, SHARD, 0)
                for o in (offsets, as_if)
            )
            for a, b in zip(got[:2], wanted[:2], strict=True):
                assert_bytes_equal(a, b, f"{offsets}")
