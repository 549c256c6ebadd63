"""Checkpoint: a folder of weights, opened and checked, read one weight at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..functional.qtensor import QTensor
from ..policy.formats import Format
from . import fp8, layouts
from .doubt import check_codes, check_config, check_plain
from .errors import Invalid
from .folder import Folder, config_dtype
from .fp8 import Fp8
from .layout import Group, Layout
from .stored import Stored

AnyWeight = Stored | Fp8 | Tensor


class Checkpoint(Mapping):
    """Weight name → QTensor, Fp8, or Tensor where it is not quantized. Nothing is read before it is asked for.

    A quantized weight has the name that its plain parameter would have, whatever the layout calls its pieces, and its
    contraction last: [N, K], or [E, N, K] for a stack of experts.

    Args:
        path: a folder with safetensors (one file, or shards with an index), or one such file.

    Attributes:
        layout: the Layout it is in.
        config: its config.json.
        fp8: the names of its FP8 weights → their tensors by role.

    Raises:
        Refused: see header.py and folder.py; a piece of a weight is missing or there twice; two layouts at once.
    """

    def __init__(self, path: str | Path):
        self.folder = Folder(path)
        self.config = self.folder.config
        check_config(self.folder)
        check_codes(self.folder)
        self.fp8 = fp8.find(self.folder)
        rest = self.folder.without({tensor for pieces in self.fp8.values() for tensor in pieces.values()})
        self.layout: Layout = layouts.detect(rest)
        self._groups = self.layout.groups(rest)
        self._formats = {name: self.layout.format(name, group, rest) for name, group in self._groups.items()}
        for name, pieces in self.fp8.items():
            if name in self._groups:
                raise Invalid(f"{self.folder.path}: {name!r} is FP8, and {self._groups[name]} belong to it too")
            self._groups[name], self._formats[name] = pieces, None
            fp8.block_of(self.folder, name, pieces)
        in_order = sorted(self._groups, key=lambda name: self.folder.place(self._groups[name]))
        self._groups = {name: self._groups[name] for name in in_order}
        for name, fmt in self._formats.items():
            if fmt is None and name not in self.fp8:
                check_plain(self.folder, name)
            else:
                self._check_sizes(name)

    def __getitem__(self, name: str) -> QTensor | Fp8 | Tensor:
        weight = self.weight(name)
        return weight.q if isinstance(weight, Stored) else weight

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def weight(self, name: str) -> AnyWeight:
        """A weight, its outer scale in the file's own numbers. Raises KeyError, or Refused for one that is faulty."""
        if name in self.fp8:
            return fp8.read(self.folder, name, self.fp8[name], config_dtype(self.config))
        if self._formats[name] is None:
            return self.folder.read(name)
        return self.layout.read(name, self._groups[name], self.folder, config_dtype(self.config))

    def format(self, name: str) -> Format | None:
        """The Format of a weight, None where it is plain or FP8."""
        return self._formats[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape, from the headers alone."""
        group, fmt = self._groups[name], self._formats[name]
        return self.folder.slots[name].shape if fmt is None else self.layout.shape(name, group, self.folder, fmt)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a plain weight, or that in which the model computes."""
        return self.folder.slots[name].dtype if self._formats[name] is None else config_dtype(self.config)

    def nbytes(self, name: str) -> int:
        """Bytes on the disk, companions included."""
        return sum(self.folder.nbytes(tensor) for tensor in self._groups[name].values())

    def group(self, name: str) -> Group:
        """The tensors that a weight is made of, by role."""
        return self._groups[name]

    def other_metadata(self) -> list[str]:
        """Keys of the files' metadata that say nothing of a weight."""
        own = {f"{name}.{what}" for name in self for what in ("format", "shape", "dtype")}
        return [key for key in self.folder.metadata if key != "format" and key not in own]

    def _check_sizes(self, name: str) -> None:
        """No tensor of a quantized weight may be empty: behind a zero, the other lengths are only claims."""
        for tensor in self._groups[name].values():
            shape = self.folder.slots[tensor].shape
            if 0 in shape:
                raise Invalid(
                    f"{self.folder.path}: {tensor!r} is {shape}; accepted: a quantized weight that is not empty"
                )

    def __repr__(self) -> str:
        packed = sum(fmt is not None for fmt in self._formats.values()) + len(self.fp8)
        return f"Checkpoint({self.folder.path}, {self.layout.name}, {len(self)} weights, {packed} of them quantized)"
