"""docs/numerics.md, 10."""

import pytest
import torch

from fp4ext.reference import swizzle, unswizzle


@pytest.mark.parametrize("rows,blocks", [(1, 1), (48, 6), (128, 4), (129, 5), (300, 17)])
def test_places_and_zero_padding(rows, blocks):
    scales = torch.randint(1, 256, (rows, blocks), dtype=torch.uint8)
    flat = swizzle(scales)
    tiles = -(-blocks // 4)
    assert flat.numel() == -(-rows // 128) * tiles * 512
    left = flat.clone()
    for i in range(rows):
        for j in range(blocks):
            off = ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
            assert flat[off] == scales[i, j]
            left[off] = 0
    assert not left.any()
    assert torch.equal(unswizzle(flat, rows, blocks), scales)


def test_experts_are_padded_on_their_own():
    scales = torch.randint(1, 256, (3, 70, 6), dtype=torch.uint8).view(torch.float8_e4m3fn)
    flat = swizzle(scales)
    assert flat.shape == (3, 128 * 8) and flat.dtype == torch.float8_e4m3fn
    for e in range(3):
        assert torch.equal(flat[e].view(torch.uint8), swizzle(scales[e]).view(torch.uint8))
    assert torch.equal(unswizzle(flat, 70, 6).view(torch.uint8), scales.view(torch.uint8))


def test_empty():
    assert swizzle(torch.zeros(0, 4, dtype=torch.uint8)).numel() == 0
