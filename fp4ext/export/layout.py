"""What a layout is: how a checkpoint names and shapes the pieces of a quantized weight, and what it says beside them.

A weight has the name that its plain parameter would have ("model.layers.0.mlp.up_proj.weight"). A layout adds
companions to that name. Reading: tensors → groups, one a weight → Stored. Writing: Stored → tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..policy.formats import Format
from .errors import Invalid
from .folder import Folder
from .fp8 import Fp8
from .kv_cache import KvCache
from .stored import Stored

Group = dict[str, str]  # role → tensor name


class Pieces(NamedTuple):
    """A weight's tensors, what the file's metadata says of it, and what its bits could not keep, if anything."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str] = {}
    lost: str | None = None


@dataclass
class Written:
    """What went into a checkpoint, for its config.

    Attributes:
        formats: weight name → format. with_inputs: the names of those with an input scale.
        plain: the plain matrices' names.
        fp8: the names of FP8 weights → each, without its codes' bytes.
        kv_cache: the scheme of the KV cache.
    """

    formats: dict[str, str] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    with_inputs: set[str] = field(default_factory=set)
    fp8: dict[str, Fp8] = field(default_factory=dict)
    kv_cache: KvCache | None = None


class Layout(ABC):
    """One layout.

    Attributes:
        name: as users say it.
        formats: the formats that it can hold, the default first.
        stacked: whether the experts of a layer are one tensor.
        experts_only: whether nothing else is quantized.
        transposed: whether the plain parameter of a stack is [E, K, N].
        says_kv_cache: whether its config says how the KV cache is quantized.
        of_modules: whether it names the weights of modules only, which end with ".weight".
        roles: suffix → role of the companions of a weight.
    """

    name: str
    formats: tuple[Format, ...]
    stacked = False
    experts_only = False
    transposed = False
    says_kv_cache = False
    of_modules = False
    roles: dict[str, str]

    @abstractmethod
    def claims(self, folder: Folder) -> bool:
        """Whether the folder's tensors are in this layout."""

    def base(self, prefix: str) -> str:
        """The weight's name, from a companion's name without its suffix."""
        return f"{prefix}.weight" if self.of_modules else prefix

    def format(self, name: str, group: Group, folder: Folder) -> Format | None:
        """The format of a group by its headers, None for a plain tensor. Raises Refused, see packed_format."""
        return None if group.keys() == {"plain"} else self.packed_format(name, group, folder)

    @abstractmethod
    def packed_format(self, name: str, group: Group, folder: Folder) -> Format:
        """The format of a quantized weight by its headers.

        Raises:
            Refused: a companion is missing, or one is present that the others do not explain.
        """

    def shape(self, name: str, group: Group, folder: Folder, fmt: Format) -> tuple[int, ...]:
        """The logical shape of a quantized weight, from the headers alone."""
        scales = next((folder.slots[group[role]].shape for role in ("scale", "scales") if role in group), None)
        if scales is None:
            raise NotImplementedError(f"layout {self.name} names its block scales otherwise, and must override shape")
        return (*scales[:-1], scales[-1] * fmt.block) if scales else ()

    @abstractmethod
    def read(self, name: str, group: Group, folder: Folder, dtype: torch.dtype) -> Stored:
        """A weight of the folder. Raises Refused for what cannot be one."""

    @abstractmethod
    def write(self, name: str, weight: Stored) -> Pieces:
        """What a weight becomes in a file."""

    def write_fp8(self, name: str, weight: Fp8) -> Pieces:
        """What an FP8 weight becomes in a file: what it was, where the layout has no names for it."""
        own = {"codes": name, "scale": f"{name}_scale", "input_scale": f"{name.removesuffix('weight')}input_scale"}
        tensors = {(own | weight.names)[role]: t for role in own if (t := getattr(weight, role)) is not None}
        return Pieces(tensors, lost=f"kept in FP8, of which a config of {self.name} says nothing")

    def why_not(self, name: str, weight_format: Format) -> str | None:
        """Why a weight cannot be written here, None where it can."""
        if self.of_modules and not name.endswith(".weight"):
            return f"{self.name} holds modules' weights, whose names end with .weight"
        if weight_format not in self.formats:
            return f"{self.name} holds {', '.join(map(str, self.formats))}, not {weight_format}"
        return None

    def describe(self, config: dict, written: Written) -> dict[str, dict]:
        """The JSON files that tell a reader of it: file name → object. `config` is the model's config.json."""
        return {"config.json": config} if config else {}

    def groups(self, folder: Folder) -> dict[str, Group]:
        """Weight name → its tensors by role. A tensor of no known role is a plain one."""
        groups: dict[str, Group] = {}
        for tensor in folder.slots:
            prefix, role = self.split(tensor)
            group = groups.setdefault(self.base(prefix) if role != "plain" else tensor, {})
            if role in group:
                raise Invalid(f"{folder.path}: {tensor!r} and {group[role]!r} are the same piece of one weight")
            group[role] = tensor
        return groups

    def split(self, tensor: str) -> tuple[str, str]:
        """(the name without the companion's suffix, its role), "plain" for one that has none."""
        for suffix, role in self.roles.items():
            if tensor.endswith(suffix):
                return tensor[: -len(suffix)], role
        return tensor, "plain"


class Plain(Layout):
    """A checkpoint in which nothing is quantized."""

    name, formats, roles = "plain", (), {}

    def claims(self, folder: Folder) -> bool:
        return False

    def packed_format(self, name: str, group: Group, folder: Folder) -> Format:
        raise Invalid(f"{folder.path}: {name!r} is not quantized")

    def read(self, name: str, group: Group, folder: Folder, dtype: torch.dtype) -> Stored:
        raise Invalid(f"{folder.path}: {name!r} is not quantized")

    def write(self, name: str, weight: Stored) -> Pieces:
        raise Invalid(f"{name!r}: a plain checkpoint holds no quantized weight")


def need(name: str, group: Group, folder: Folder, **roles: tuple[torch.dtype, ...]) -> None:
    """Raises Refused unless the group is exactly these roles, each of one of its dtypes."""
    for role, dtypes in roles.items():
        if role not in group:
            what = f"{name!r} is not there" if role == "plain" else f"{name!r} has no {role.replace('_', ' ')}"
            raise Invalid(f"{folder.path}: {what}; found {', '.join(group.values())}")
        dtype = folder.slots[group[role]].dtype
        if dtype not in dtypes:
            accepted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise Invalid(
                f"{folder.path}: {group[role]!r} is {str(dtype).removeprefix('torch.')}; accepted: {accepted}"
            )
    extra = next((group[role] for role in group if role not in roles), None)
    if extra is not None:
        raise Invalid(f"{folder.path}: {extra!r} has no meaning beside {', '.join(group[r] for r in roles)}")


def number(folder: Folder, tensor: str) -> Tensor:
    """A tensor of one positive number, as fp32 []. Raises Refused for anything else."""
    value = folder.read(tensor).float()
    if value.numel() != 1 or not bool(value.isfinite().all() & (value > 0).all()):
        raise Invalid(f"{folder.path}: {tensor!r} is no positive number; accepted: one")
    return value.reshape(())
