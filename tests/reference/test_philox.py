"""docs/numerics.md, 5, random bits: Random123's known answers, the coordinates, uniformity."""

import pytest
import torch

from fp4ext.reference.philox import Rng, block_bits, element_bits, philox4x32, usage

KNOWN = [  # counter, key (low word first), answer: kat_vectors of Random123
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("counter,key,answer", KNOWN)
def test_known_answers(counter, key, answer):
    seed = key[0] | key[1] << 32
    words = philox4x32(counter, seed)
    assert " ".join(f"{int(w):08x}" for w in words) == answer
    signed = seed - (1 << 64) if seed >> 63 else seed  # a seed in an int64 tensor may be negative
    assert [int(w) for w in philox4x32(counter, signed)] == [int(w) for w in words]


def test_element_bits_at_their_coordinates():
    rng = torch.tensor([123456789012345, -3])
    use = usage("element", direction=1, role=2)
    bits = element_bits(rng, rows=3, k=32, use=use)
    for row, k in ((0, 0), (2, 7), (1, 13), (2, 31)):
        words = philox4x32((k // 8, row, use, (-3) % 2**32), 123456789012345)
        i = k % 8
        assert bits[row, k] == (int(words[i // 2]) >> (16 if i % 2 else 0)) & 0xFFFF


def test_shard_coordinates():
    whole = element_bits(torch.tensor([5, 6]), 8, 64, 0)
    assert torch.equal(element_bits(torch.tensor([5, 6, 3, 16]), 2, 32, 0), whole[3:5, 16:48])
    assert torch.equal(
        block_bits(torch.tensor([5, 6]), 8, 64, 16, 1), element_bits(torch.tensor([5, 6]), 8, 64, 1)[:, ::16]
    )


def test_row_and_eighth_are_modulo_2_32():
    assert torch.equal(
        element_bits(torch.tensor([5, 6, 2**32 + 3, 8 * 2**32]), 1, 8, 0),
        element_bits(torch.tensor([5, 6, 3, 0]), 1, 8, 0),
    )


def test_usage_is_injective():
    all_ = {usage(p, d, r) for p in ("element", "scale", "sign") for d in (0, 1) for r in (0, 1, 2)}
    assert len(all_) == 18
    assert usage("sign") == 2 and usage("scale", 1, 2) == 21


def test_uniform():
    """Chi-square over 256 bins of the high and of the low byte: 255 degrees of freedom, 5 sigma = 113."""
    bits = element_bits(torch.tensor([42, 0]), 256, 4096, 0).flatten()
    for byte in (bits >> 8, bits & 255):
        count = torch.bincount(byte, minlength=256).double()
        expected = bits.numel() / 256
        assert abs(float(((count - expected) ** 2 / expected).sum()) - 255) < 113


def test_neighbours_are_independent():
    bits = element_bits(torch.tensor([42, 0]), 256, 4096, 0).double() / 65535 - 0.5
    other = element_bits(torch.tensor([42, 0]), 256, 4096, 4).double() / 65535 - 0.5
    for a, b in ((bits[:, 1:], bits[:, :-1]), (bits[1:], bits[:-1]), (bits, other)):
        assert abs(float((a * b).mean() * 12)) < 5 / a.numel() ** 0.5


@pytest.mark.parametrize(
    "bad", [None, torch.tensor([1.0, 2.0]), torch.tensor([1, 2, 3]), torch.tensor([1, 2], dtype=torch.int32)]
)
def test_bad_rng(bad):
    with pytest.raises(ValueError, match="rng"):
        Rng.of(bad)
