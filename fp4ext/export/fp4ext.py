"""Layout "fp4ext": every format and shape that a QTensor can have, as QTensor.to_safetensors writes it.

NAME.codes   NAME.scales   NAME.global_scale      and in the file's metadata NAME.format, NAME.shape, NAME.dtype
opt. NAME.input_amax f32 [], the largest input that calibration saw
"""

from __future__ import annotations

import torch

from ..functional.qtensor import QTensor
from ..policy.formats import FORMATS, Format
from .errors import Invalid
from .folder import Folder
from .header import MAX_RANK
from .layout import Group, Layout, Pieces, Written, number
from .stored import Stored, check_scales, check_values


class Fp4ext(Layout):
    """See the module."""

    name, formats, stacked = "fp4ext", tuple(FORMATS.values()), True
    says_kv_cache = True
    roles = {".codes": "codes", ".scales": "scales", ".global_scale": "global_scale", ".input_amax": "input_amax"}

    def claims(self, folder: Folder) -> bool:
        return any(
            name.endswith(".format") and f"{name.removesuffix('.format')}.shape" in folder.metadata
            for name in folder.metadata
        )

    def groups(self, folder: Folder) -> dict[str, Group]:
        groups = super().groups(folder)
        for key in folder.metadata:
            name, _, what = key.rpartition(".")
            if name and what == "format" and name not in groups:
                raise Invalid(f"{folder.path}: {name!r} has no codes; found only what the metadata says of it")
        return groups

    def packed_format(self, name: str, group: Group, folder: Folder) -> Format:
        said = folder.metadata.get(f"{name}.format")
        if said is None or said not in FORMATS:
            raise Invalid(f"{folder.path}: {name!r} has format {said!r}; accepted: {', '.join(FORMATS)}")
        return FORMATS[said]

    def shape(self, name: str, group: Group, folder: Folder, fmt: Format) -> tuple[int, ...]:
        said = folder.metadata.get(f"{name}.shape", "").split(",")
        if len(said) > MAX_RANK or not all(n.isascii() and n.isdecimal() and len(n) < 16 for n in said):
            raise Invalid(f"{folder.path}: {name!r} has no shape; accepted: lengths such as '64,128'")
        return tuple(map(int, said))

    def read(self, name: str, group: Group, folder: Folder, dtype: torch.dtype) -> Stored:
        fmt = self.packed_format(name, group, folder)
        self.shape(name, group, folder, fmt)
        amax = number(folder, group["input_amax"]) if "input_amax" in group else None
        tensors = {f"{name}.{role}": folder.read(tensor) for role, tensor in group.items() if role != "input_amax"}
        try:
            q = QTensor.from_safetensors(name, tensors, folder.metadata)
        except (ValueError, KeyError) as error:
            raise Invalid(f"{folder.path}: {error.args[0]}") from None
        check_scales(f"{folder.path}: {name!r}", fmt, q.scales)
        g = q.global_scale
        if g is not None and not bool((g.isfinite() & (g >= 0)).all()):
            raise Invalid(f"{folder.path}: {name!r}: global_scale is not finite or negative; accepted: a multiplier")
        check_values(f"{folder.path}: {name!r}", q)
        return Stored.of(q, amax)

    def write(self, name: str, weight: Stored) -> Pieces:
        tensors, metadata = weight.q.to_safetensors(name)
        if weight.input_amax is not None:
            tensors[f"{name}.input_amax"] = weight.input_amax.reshape(())
        exact = weight.outer is None or weight.outer.as_multiplier()[1]
        return Pieces(tensors, metadata, None if exact else "global_scale is rounded to fp32 (relative 2^-24)")

    def describe(self, config: dict, written: Written) -> dict[str, dict]:
        about: dict[str, object] = {"quant_method": "fp4ext"}
        if written.kv_cache is not None:
            about |= {"kv_cache_scheme": written.kv_cache.scheme, "kv_cache_quant_algo": written.kv_cache.algo}
        return {"config.json": config | {"quantization_config": about}}
