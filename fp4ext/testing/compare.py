"""Comparisons that name the first byte that differs, its coordinate and both values."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_bytes_equal(got: Tensor, wanted: Tensor, what: str = "tensor") -> None:
    """The same shape, dtype and bits; NaNs of different bits count as equal, whatever sign or payload."""
    assert got.dtype == wanted.dtype, f"{what}: dtype {got.dtype}, wanted {wanted.dtype}"
    assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    a, b = got.contiguous().view(integer), wanted.contiguous().view(integer)
    different = a != b
    if got.dtype in (torch.float32, torch.bfloat16, torch.float16):
        different &= ~(got.isnan() & wanted.isnan())
    if different.any():
        where = tuple(different.nonzero()[0].tolist())
        show = (lambda t: hex(t.item())) if integer == torch.uint8 else (lambda t: t.item())
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} differ, first at {where}: "
            f"got {show(a[where])}, wanted {show(b[where])} (as {integer})"
        )


def assert_same_quantized(got, wanted, what: str = "") -> None:
    """(codes, scales, global_scale) equal byte for byte; the outer scale first, since the others follow from it."""
    for name, g, w in reversed(list(zip(("codes", "scales", "global_scale"), got, wanted, strict=True))):
        assert_bytes_equal(g, w, f"{what} {name}".strip())
