"""Layout "inkling2": experts in NVFP4 or MXFP8, layer by layer, stacked.

    nvfp4   experts.w13_weight u8 [E, 2F, D/2], rows g0, u0, g1, u1, …   (w2_weight u8 [E, D, F/2] alike)
            _scale e4m3 [E, N, K/16]   _amax f32 [E]   _outer_scale_denominator f32 []
    mxfp8   experts.w13_weight e4m3 [E, 2F, D]   _scale u8 [E, N, K/32]

The outer scale is amax/denominator. Its two numbers are stored, so a rule that leaves room above (denominator 1536) and
one that does not (2688) need no flag. The release's loader takes amax through BF16, so an amax that BF16 has is written
where there is one; where there is none, the report says so.
"""

from __future__ import annotations

import torch

from ..policy.formats import MXFP8, NVFP4, Format
from .folder import Folder
from .layout import Group, Layout, Pieces, Written, need
from .stored import Outer, Stored, stored

U8, E4M3, E8M0, F32 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32
WEIGHTS = ("experts.w13_weight", "experts.w2_weight")
SUFFIXES = {"_scale": "scale", "_amax": "amax", "_outer_scale_denominator": "denominator"}


class Inkling2(Layout):
    """See the module."""

    name, formats, stacked, experts_only = "inkling2", (NVFP4, MXFP8), True, True
    roles = {f"{weight}{suffix}": role for weight in WEIGHTS for suffix, role in SUFFIXES.items()}

    def claims(self, folder: Folder) -> bool:
        return any(name.endswith(tuple(f"{weight}_scale" for weight in WEIGHTS)) for name in folder.slots)

    def split(self, tensor: str) -> tuple[str, str]:
        for suffix, role in SUFFIXES.items():
            if tensor.endswith(tuple(f"{weight}{suffix}" for weight in WEIGHTS)):
                return tensor.removesuffix(suffix), role
        return tensor, "plain"

    def packed_format(self, name: str, group: Group, folder: Folder) -> Format:
        if group.keys() == {"plain", "scale"} and folder.slots[group["plain"]].dtype != U8:
            need(name, group, folder, plain=(E4M3,), scale=(U8, E8M0))
            return MXFP8
        need(name, group, folder, plain=(U8,), scale=(E4M3,), amax=(F32,), denominator=(F32,))
        return NVFP4

    def read(self, name: str, group: Group, folder: Folder, dtype: torch.dtype) -> Stored:
        fmt = self.packed_format(name, group, folder)
        codes, scales = folder.read(group["plain"]), folder.read(group["scale"])
        outer = Outer(folder.read(group["amax"]), folder.read(group["denominator"])) if fmt is NVFP4 else None
        return stored(f"{folder.path}: {name!r}", fmt, codes, scales, outer, dtype)

    def describe(self, config: dict, written: Written) -> dict[str, dict]:
        if set(written.formats.values()) != {"mxfp8"} or "loop" in str(config.get("model_type")):
            return super().describe(config, written)  # NVFP4 is known by its tensors
        about = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "scale_fmt": "ue8m0",
            "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in written.plain),
        }
        return {"config.json": config | {"quantization_config": about}}

    def write(self, name: str, weight: Stored) -> Pieces:
        q = weight.q
        if q.format is MXFP8:
            return Pieces({name: q.codes, f"{name}_scale": q.scales.view(U8)}, lost=_inputs_lost(weight))
        amax, denominator, off = weight.nvfp4_outer.as_amax()
        lost = [_inputs_lost(weight)]
        if off:
            lost = [
                f"the outer scale is off by {off:.0e} for the release's loader, which takes amax through BF16",
                *lost,
            ]
        tensors = {
            name: q.codes,
            f"{name}_scale": q.scales,
            f"{name}_amax": amax,
            f"{name}_outer_scale_denominator": denominator,
        }
        return Pieces(tensors, lost="; ".join(filter(None, lost)) or None)


def _inputs_lost(weight: Stored) -> str | None:
    return None if weight.input_amax is None else "the input scale has no place in the layout"
