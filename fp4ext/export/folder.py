"""A folder of safetensors, as checkpoints come: one file, or shards and an index; config.json beside them.

Opening one reads headers and JSON only, and checks that they agree. A tensor's bytes are read when asked for, into
memory of their own (no mapping: what was read and dropped is gone).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Container
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import comfy
from .errors import Invalid
from .header import Header, Slot, parse_json, read_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON = 64_000_000  # bytes of an index or a config
KEPT_OPEN = 4  # files
SIDE_KINDS = {".json", ".txt", ".model", ".jinja", ".md"}
SIDE_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "README", "USE_POLICY", "USAGE_POLICY")  # without a suffix
# The same weights again under other names, or an adapter to them: no part of the model.
COPIES = ("consolidated", "adapter_model")


class Folder:
    """An opened checkpoint.

    Attributes:
        path: the folder, or the one file it is.
        slots: tensor name → its dtype, shape and place.
        metadata: the files' metadata, merged.
        config: config.json, {} where there is none. quant_config: hf_quant_config.json, likewise.
        shards: the files that hold the tensors.
        beside: names of those among them that neither the index names nor is model.safetensors; a release may keep
            a part of the model there (mtp.safetensors).

    Raises:
        Refused: the folder, a file of it or a tensor cannot be believed. See header.py.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.slots: dict[str, Slot] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        self._open: OrderedDict[Path, safe_open] = OrderedDict()
        self.shards, listed = self._shards()
        for shard in self.shards:
            self._add(shard, read_header(shard), listed)
        self.beside: set[str] = set()
        for shard in self._others():
            header = read_header(shard)
            if not header.slots.keys() <= self.slots.keys():  # else a variant of the same weights
                self._add(shard, header, None)
                self.shards.append(shard)
                self.beside.add(shard.name)
        for name in listed or ():
            if name not in self.slots:
                raise Invalid(f"{self.path / INDEX}: tensor {name!r} is in no file; accepted: an index that agrees")
        self.config = read_object(self.root / "config.json")
        self.quant_config = read_object(self.root / "hf_quant_config.json")

    @property
    def root(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def quantization(self) -> dict:
        """quantization_config of config.json, {} where it has none."""
        return _object(self.config.get("quantization_config"))

    @property
    def hf_quantization(self) -> dict:
        """The entry `quantization` of hf_quant_config.json, {} where there is none."""
        return _object(self.quant_config.get("quantization"))

    @property
    def is_of_modelopt(self) -> bool:
        """Whether a config says that modelopt wrote the checkpoint."""
        return bool(self.quant_config) or self.quantization.get("quant_method") == "modelopt"

    def read(self, name: str) -> Tensor:
        """One tensor. Raises Refused where the file has changed since it was opened."""
        slot = self.slots[name]
        try:
            tensor = self._opened(self._files[name]).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise Invalid(f"{self._files[name]}: tensor {name!r} cannot be read ({error})") from None
        if tensor.dtype != slot.dtype or tuple(tensor.shape) != slot.shape:
            raise Invalid(f"{self._files[name]}: tensor {name!r} has changed while it was read")
        return tensor

    def _opened(self, shard: Path) -> safe_open:
        """The file, whose header the library parses once; the last few stay open."""
        if shard not in self._open:
            self._open[shard] = safe_open(shard, "pt", backend="pread")
            while len(self._open) > KEPT_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.slots)}

    @cached_property
    def comfy(self) -> dict[str, comfy.Nibbles]:
        """What ComfyUI's markers say of modules, see comfy.py."""
        return comfy.markers(self.path, self.metadata, self.slots, self.read)

    def without(self, names: Container[str]) -> Folder:
        """The same folder as if it had no tensors of these names."""
        other = copy.copy(self)
        other.slots = {name: slot for name, slot in self.slots.items() if name not in names}
        return other

    def is_beside(self, name: str) -> bool:
        """Whether a tensor lies in one of the files `beside`."""
        return self._files[name].name in self.beside

    def place(self, group: dict[str, str]) -> int:
        """Where the first tensor of a group stands among all."""
        return min(self._order[tensor] for tensor in group.values())

    def nbytes(self, name: str) -> int:
        return self.slots[name].nbytes

    def side_files(self) -> list[Path]:
        """Files beside the weights that a reader may want: tokenizers, templates, licences. No weights, no code."""
        return [path for path, why in self._side() if why is None]

    def left_aside(self) -> dict[str, str]:
        """Name of a file or folder that is neither read nor copied along → why."""
        return {path.name: why for path, why in self._side() if why is not None}

    def _side(self) -> list[tuple[Path, str | None]]:
        """Everything in the folder but the weights and what describes them, and why it stays behind, if it does."""
        if not self.path.is_dir():
            return []
        ours = {"config.json", "hf_quant_config.json", INDEX, *(shard.name for shard in self.shards)}
        there = sorted(path for path in self.path.iterdir() if path.name not in ours)
        return [(path, self._why_aside(path)) for path in there]

    def _why_aside(self, path: Path) -> str | None:
        if path.name[0] == ".":
            return "hidden"
        if path.suffix == ".safetensors":
            return "other weights"
        if path.is_symlink() and not self._within(path):
            return "a link that leaves the checkpoint"
        if path.is_dir():
            return "a folder"
        if not path.is_file():
            return "not a regular file"
        if path.suffix in SIDE_KINDS or (not path.suffix and path.name.upper().startswith(SIDE_NAMES)):
            return None
        return "of a kind that is not copied"

    def _within(self, link: Path) -> bool:
        """Whether a link stays in the folder, or goes from a snapshot of the Hugging Face cache to its blobs."""
        to, home = link.resolve(), self.path.resolve()
        return to.parent == home or (home.parent.name == "snapshots" and to.parent == home.parent.parent / "blobs")

    def _shards(self) -> tuple[list[Path], dict[str, str] | None]:
        """The files that hold tensors, and what the index says of them, if there is one."""
        if self.path.is_file():
            return [self.path], None
        if not self.path.is_dir():
            raise Invalid(
                f"{self.path}: not there; accepted: a folder with {WEIGHTS} or {INDEX}, or a safetensors file"
            )
        index = self.path / INDEX
        if not index.exists():
            found = sorted(self.path.glob("*.safetensors"))
            if self.path / WEIGHTS in found:
                found = [self.path / WEIGHTS]
            if len(found) == 1:
                return found, None
            what = f"{len(found)} safetensors files and no index" if found else "no safetensors file in it"
            raise Invalid(f"{self.path}: {what}; accepted: a folder with {WEIGHTS} or {INDEX}")
        listed = read_object(index).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(shard, str) for shard in listed.values()):
            raise Invalid(f"{index}: no weight_map of names; accepted: tensor name → file name")
        for name, shard in listed.items():
            if shard in ("", ".", "..") or any(c in shard for c in "/\\\0"):
                raise Invalid(f"{index}: tensor {name!r} lies in {shard!r}; accepted: a file name in the same folder")
        return [self.path / shard for shard in sorted(set(listed.values()))], listed

    def _others(self) -> list[Path]:
        """Weights beside those that the index, or the usual name, leads to."""
        known = {shard.name for shard in self.shards}
        found = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else []
        return [
            path
            for path in found
            if path.name not in known and not path.name.startswith(COPIES) and path.name[0] != "."
        ]

    def _add(self, shard: Path, header: Header, listed: dict[str, str] | None) -> None:
        for name, slot in header.slots.items():
            if name in self.slots:
                raise Invalid(
                    f"{shard}: tensor {name!r} is also in {self._files[name].name}; accepted: one of each name"
                )
            if listed is not None and listed.get(name) != shard.name:
                what = f"the index has it in {listed[name]}" if name in listed else "the index does not list it"
                raise Invalid(
                    f"{shard}: tensor {name!r} is here, {what}; accepted: an index that agrees with its files"
                )
            self.slots[name], self._files[name] = slot, shard
        for key, value in header.metadata.items():
            if self.metadata.setdefault(key, value) != value:
                raise Invalid(f"{shard}: metadata {key!r} differs between shards; accepted: one value")


def _object(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def read_object(path: Path) -> dict:
    """A JSON object from a file; {} where there is no file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_JSON:
        raise Invalid(f"{path}: {path.stat().st_size} bytes; accepted: at most {MAX_JSON}")
    value = parse_json(path.read_bytes(), path)
    if not isinstance(value, dict):
        raise Invalid(f"{path}: a {type(value).__name__}; accepted: a JSON object")
    return value


def config_dtype(config: dict) -> torch.dtype:
    """The dtype that a config.json says its model computes in; BF16 where it does not say."""
    text = config.get("text_config")
    said = [part.get(key) for part in (config, text) if isinstance(part, dict) for key in ("dtype", "torch_dtype")]
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return next((known[name] for name in said if isinstance(name, str) and name in known), torch.bfloat16)
