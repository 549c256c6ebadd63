"""Checkpoint: a folder of weights, opened and checked, read one weight at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..formats import Format
from ..qtensor import QTensor
from . import layouts
from .errors import Refused
from .folder import Folder, config_dtype
from .layout import Group, Layout
from .stored import Stored


class Checkpoint(Mapping):
    """Weight name → QTensor, or Tensor where it is not quantized. Nothing is read before it is asked for.

    A quantized weight has the name that its plain parameter would have, whatever the layout calls its pieces, and its
    contraction last: [N, K], or [E, N, K] for a stack of experts.

    Args:
        path: a folder with safetensors (one file, or shards with an index), or one such file.

    Attributes:
        layout: the Layout it is in.
        config: its config.json.

    Raises:
        Refused: see header.py and folder.py; a piece of a weight is missing or there twice; two layouts at once.
    """

    def __init__(self, path: str | Path):
        self.folder = Folder(path)
        self.layout: Layout = layouts.detect(self.folder)
        self.config = self.folder.config
        self._groups = self.layout.groups(self.folder)
        self._formats = {name: self.layout.format(name, group, self.folder) for name, group in self._groups.items()}
        for name, fmt in self._formats.items():
            if fmt is None:
                self._check_plain(name)

    def __getitem__(self, name: str) -> QTensor | Tensor:
        weight = self.weight(name)
        return weight.q if isinstance(weight, Stored) else weight

    def __contains__(self, name) -> bool:
        return name in self._groups

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def weight(self, name: str) -> Stored | Tensor:
        """A weight, its outer scale in the file's own numbers. Raises KeyError, or Refused for one that is faulty."""
        if self._formats[name] is None:
            return self.folder.read(name)
        return self.layout.read(name, self._groups[name], self.folder, config_dtype(self.config))

    def format(self, name: str) -> Format | None:
        """The Format of a weight, None where it is plain."""
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

    def _check_plain(self, name: str) -> None:
        """Codes without a scale are no weight: they must not pass for one."""
        slot = self.folder.slots.get(name)
        if slot is None:
            raise Refused(f"{self.folder.path}: {name!r} is missing, a piece that belongs to it is there")
        packed = slot.dtype == torch.uint8 and len(slot.shape) > 1 and name.endswith("weight")
        if slot.dtype.itemsize == 1 and (slot.dtype.is_floating_point or packed):
            what = f"is {str(slot.dtype).removeprefix('torch.')}, and no scale of it is there"
            raise Refused(f"{self.folder.path}: {name!r} {what}; accepted: a weight with its scales")

    def __repr__(self) -> str:
        packed = sum(fmt is not None for fmt in self._formats.values())
        return f"Checkpoint({self.folder.path}, {self.layout.name}, {len(self)} weights, {packed} of them quantized)"
