"""A folder of safetensors, as checkpoints come: one file, or shards and an index; config.json beside them.

Opening one reads headers and JSON only, and checks that they agree. A tensor's bytes are read when asked for, into
memory of their own (no mapping: what was read and dropped is gone).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import Refused
from .header import Header, Slot, parse_json, read_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON = 64_000_000  # bytes of an index or a config


class Folder:
    """An opened checkpoint.

    Attributes:
        path: the folder, or the one file it is.
        slots: tensor name → its dtype, shape and place.
        metadata: the files' metadata, merged.
        config: config.json, {} where there is none. quant_config: hf_quant_config.json, likewise.

    Raises:
        Refused: the folder, a file of it or a tensor cannot be believed. See header.py.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.slots: dict[str, Slot] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        self.shards, listed = self._shards()
        for shard in self.shards:
            self._add(shard, read_header(shard), listed)
        for name in listed or ():
            if name not in self.slots:
                raise Refused(f"{self.path / INDEX}: tensor {name!r} is in no file; accepted: an index that agrees")
        self.config = read_object(self.root / "config.json")
        self.quant_config = read_object(self.root / "hf_quant_config.json")

    @property
    def root(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def read(self, name: str) -> Tensor:
        """One tensor. Raises Refused where the file has changed since it was opened."""
        slot = self.slots[name]
        try:
            with safe_open(self._files[name], "pt", backend="pread") as file:
                tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise Refused(f"{self._files[name]}: tensor {name!r} cannot be read ({error})") from None
        if tensor.dtype != slot.dtype or tuple(tensor.shape) != slot.shape:
            raise Refused(f"{self._files[name]}: tensor {name!r} has changed while it was read")
        return tensor

    def nbytes(self, name: str) -> int:
        return self.slots[name].nbytes

    def side_files(self) -> list[Path]:
        """Files beside the weights that a reader may want: tokenizers, templates, licences. No weights, no code."""
        if not self.path.is_dir():
            return []
        ours = {"config.json", "hf_quant_config.json", INDEX}
        kinds = {".json", ".txt", ".model", ".jinja", ".md", ""}
        return sorted(
            p
            for p in self.path.iterdir()
            if p.suffix in kinds and p.name not in ours and p.is_file() and p.name[0] != "."
        )

    def _shards(self) -> tuple[list[Path], dict[str, str] | None]:
        """The files that hold tensors, and what the index says of them, if there is one."""
        if self.path.is_file():
            return [self.path], None
        if not self.path.is_dir():
            raise Refused(
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
            raise Refused(f"{self.path}: {what}; accepted: a folder with {WEIGHTS} or {INDEX}")
        listed = read_object(index).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(shard, str) for shard in listed.values()):
            raise Refused(f"{index}: no weight_map of names; accepted: tensor name → file name")
        for name, shard in listed.items():
            if shard in ("", ".", "..") or any(c in shard for c in "/\\\0"):
                raise Refused(f"{index}: tensor {name!r} lies in {shard!r}; accepted: a file name in the same folder")
        return [self.path / shard for shard in sorted(set(listed.values()))], listed

    def _add(self, shard: Path, header: Header, listed: dict[str, str] | None) -> None:
        for name, slot in header.slots.items():
            if name in self.slots:
                raise Refused(
                    f"{shard}: tensor {name!r} is also in {self._files[name].name}; accepted: one of each name"
                )
            if listed is not None and listed.get(name) != shard.name:
                what = f"the index has it in {listed[name]}" if name in listed else "the index does not list it"
                raise Refused(
                    f"{shard}: tensor {name!r} is here, {what}; accepted: an index that agrees with its files"
                )
            self.slots[name], self._files[name] = slot, shard
        for key, value in header.metadata.items():
            if self.metadata.setdefault(key, value) != value:
                raise Refused(f"{shard}: metadata {key!r} differs between shards; accepted: one value")


def read_object(path: Path) -> dict:
    """A JSON object from a file; {} where there is no file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_JSON:
        raise Refused(f"{path}: {path.stat().st_size} bytes; accepted: at most {MAX_JSON}")
    value = parse_json(path.read_bytes(), path)
    if not isinstance(value, dict):
        raise Refused(f"{path}: a {type(value).__name__}; accepted: a JSON object")
    return value


def config_dtype(config: dict) -> torch.dtype:
    """The dtype that a config.json says its model computes in; BF16 where it does not say."""
    text = config.get("text_config")
    said = [part.get(key) for part in (config, text) if isinstance(part, dict) for key in ("dtype", "torch_dtype")]
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return next((known[name] for name in said if isinstance(name, str) and name in known), torch.bfloat16)
