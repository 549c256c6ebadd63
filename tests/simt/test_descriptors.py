"""Descriptors of tcgen05 are those that CUTLASS's constructors give for the same operands (make_umma_desc, UMMA's
InstrDescriptorBlockScaled), computed on a host and kept here."""

import pytest


@pytest.mark.parametrize("m, first", [(128, 0x08), (256, 0x10)])
def test_instructions(simt, m, first):
    """Single blocks and pairs; of MXFP8 the byte of the scales stands in bits 4 and 29."""
    assert simt.ops.instruction("nvfp4", m, 128, 0) == first << 24 | 0x200480
    for scale, (low, high) in enumerate([(0x00, 0x00), (0x10, 0x20), (0x20, 0x40), (0x30, 0x60)]):
        assert simt.ops.instruction("mxfp8", m, 128, scale) == (first + high) << 24 | 0xA00000 | low


def test_operands(simt):
    """K-major rows of 128 bytes, swizzled: at every address where a tile may begin."""
    for address in range(0, 228 << 10, 1024):
        assert simt.ops.descriptor("operand", address) == 0x40004040 << 32 | address >> 4


def test_scales(simt):
    """8 rows × 16 bytes after each other. The offset in the lower word is not read where an atom is as wide as K."""
    for address in range(0, 228 << 10, 512):
        descriptor = simt.ops.descriptor("scales", address)
        assert descriptor >> 32 == 0x00004008 and descriptor & 0x3FFF == address >> 4
