"""Operands of GEMMs of random bytes, as tests of the SIMT machine hand them over."""

from dataclasses import dataclass

import torch
from torch import Tensor

import fp4ext
from fp4ext import reference

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Operand:
    """Codes, scales and global scale; rows can be picked."""

    format: str
    codes: Tensor
    scales: Tensor | None = None
    outer: Tensor | None = None

    def __getitem__(self, rows):
        outer = self.outer if self.outer is None or self.outer.numel() == 1 else self.outer[rows]
        return Operand(self.format, self.codes[rows], None if self.scales is None else self.scales[rows], outer)

    @property
    def parts(self):
        return self.codes, self.scales, self.outer, self.format

    def values(self) -> Tensor:
        """fp64, without the global scale."""
        if self.scales is None:
            return self.codes.double()
        k = self.codes.shape[-1] * (2 if self.format in ("nvfp4", "mxfp4") else 1)
        return torch.ops.fp4ext.dequantize(*self.parts[:2], torch.ones(1), self.format, k, "float32").double()

    def globals(self) -> Tensor:
        return torch.ones(1, 1).double() if self.outer is None else self.outer.double().reshape(-1, 1)


def operand(format: str, *shape: int, seed: int, outer: str = "tensor", integers: bool = False) -> Operand:
    """[.., rows, K]: any codes, scales over many powers of two. integers: small integers and scales 1, so that every
    partial sum is exact."""
    g = torch.Generator().manual_seed(seed)
    *rows, k = shape
    if format in PLAIN:
        x = torch.randint(-8, 9, shape, generator=g).float() if integers else torch.randn(shape, generator=g)
        return Operand(format, x.to(PLAIN[format]))
    fmt = fp4ext.formats.get(format)
    padded = k + -k % fmt.block
    e2m1 = format in ("nvfp4", "mxfp4")
    codes = torch.randint(0, 16 if e2m1 else 256, (*rows, padded), generator=g).to(torch.uint8)
    if not e2m1:
        codes[(codes & 0x7F) > (0x7E if format == "mxfp8" else 0x7B)] = 1  # finite
        if integers:  # 1, 2 and 3 of either sign
            one, two, three = (0x38, 0x40, 0x44) if format == "mxfp8" else (0x3C, 0x40, 0x42)
            codes = torch.tensor([one, two, three])[codes.long() % 3].to(torch.uint8) | (codes & 0x80)
    codes[..., k:] = 0
    if e2m1:
        codes = reference.pack_nibbles(codes)
    low, high = (0, 0x7F) if format == "nvfp4" else (110, 140)
    scales = torch.randint(low, high, (*rows, padded // fmt.block), generator=g).to(torch.uint8)
    if integers:
        scales[:] = 0x38 if format == "nvfp4" else 127
    makers = {"tensor": (1,), "row": (*rows, 1), "none": None}
    outer_shape = makers[outer] if format == "nvfp4" else None
    return Operand(format, codes, scales, None if outer_shape is None else torch.rand(outer_shape, generator=g) + 0.5)


def exact(x: Operand, w: Operand, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y in fp64, and Σ|x̂·ŵ| in the same units."""
    xv, wv = x.values(), w.values()
    k = min(xv.shape[-1], wv.shape[-1])
    outer = x.globals() * w.globals().mT
    y, size = xv[:, :k] @ wv[:, :k].mT * outer, xv[:, :k].abs() @ wv[:, :k].mT.abs() * outer
    return (y if bias is None else y + bias.double()), size
