"""The keys and values of what sequences have read: in the activations' own dtype, or in a block format.

A quantized cache is a rounding in the model: attention reads k̂ = dequantize(quantize(k)), one position and head at a
time. The trainer's forward takes the same rounding (`rounded`), so that it stays the sampler's function; its gradient
passes straight through.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import fp4ext
from fp4ext import QTensor, Spec

FORMATS = {
    "bf16": None,
    "mxfp8": Spec("mxfp8"),
    "nvfp4": Spec("nvfp4", "sweep", outer="row"),
}


@dataclass
class Store:
    """Rows in a cache, [layers, batch, heads, capacity, …] each: values as they are, or codes, scales, outer scales.

    Attributes:
        parts: the tensors.
        d: elements a row.
        spec: how rows are quantized, or None.
        dtype: of the rows.
    """

    parts: tuple[Tensor, ...]
    d: int
    spec: Spec | None
    dtype: torch.dtype

    @classmethod
    def empty(cls, layers: int, batch: int, heads: int, capacity: int, d: int, spec: Spec | None, dtype) -> Store:
        row = torch.zeros(1, d, dtype=dtype)
        parts = (row,) if spec is None else tuple(map(_bytes, fp4ext.quantize(row, spec).tensors().values()))
        size = (layers, batch, heads, capacity)
        return cls(tuple(torch.zeros(*size, t.shape[-1], dtype=t.dtype) for t in parts), d, spec, dtype)

    def slots(self, first: int, end: int, reach: int) -> Store:
        """A view of sequences first … end-1, as far as position reach-1."""
        return Store(tuple(t[:, first:end, :, :reach] for t in self.parts), self.d, self.spec, self.dtype)

    def move(self, source: int, target: int, reach: int) -> None:
        """Copy a sequence's rows into another slot."""
        for t in self.parts:
            t[:, target, :, :reach] = t[:, source, :, :reach]

    def write(self, layer: int, positions: Tensor, rows: Tensor) -> None:
        """Rows [batch, heads, time, d] to positions [batch, time]."""
        batch = torch.arange(len(positions))[:, None]
        new = (rows,) if self.spec is None else map(_bytes, fp4ext.quantize(rows, self.spec).tensors().values())
        for t, part in zip(self.parts, new, strict=True):
            t[layer][batch, :, positions] = part.transpose(1, 2)

    def read(self, layer: int) -> Tensor:
        """All rows of a layer, [batch, heads, capacity, d], in `dtype`."""
        here = [t[layer] for t in self.parts]
        if self.spec is None:
            return here[0]
        fmt = self.spec.fmt
        shape = torch.Size((*here[0].shape[:-1], self.d))
        typed = here[0].view(fmt.codes_dtype), here[1].view(fmt.scale_dtype), here[2] if len(here) > 2 else None
        return QTensor(*typed, fmt, shape, self.dtype).dequantize()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.parts)


@dataclass
class Past:
    """Keys and values of what sequences have read, for the stages of RL.

    Attributes:
        start: int64 [batch], how many positions each sequence has read. The model writes new keys and values from there
            on; whoever calls it moves `start`.
    """

    keys: Store
    values: Store
    start: Tensor

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v [batch, heads, time, head_dim] behind the past; all keys and values of the layer."""
        positions = self.start[:, None] + torch.arange(k.shape[2])
        self.keys.write(layer, positions, k)
        self.values.write(layer, positions, v)
        return self.keys.read(layer), self.values.read(layer)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, spec: Spec) -> Tensor:
        return fp4ext.quantize(x, spec).dequantize()

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None


def rounded(x: Tensor, spec: Spec | None) -> Tensor:
    """What a cache of that spec gives back for rows x."""
    return x if spec is None else _Rounded.apply(x, spec)


def _bytes(t: Tensor) -> Tensor:
    """8-bit floats as bytes: few torch functions know them."""
    return t.view(torch.uint8) if t.element_size() == 1 else t
