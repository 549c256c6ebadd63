"""Layout "gpt-oss": MXFP4 experts, stacked.

    experts.gate_up_proj_blocks u8 [E, N, K/32, 16]   experts.gate_up_proj_scales u8 [E, N, K/32]   (down_proj alike)

The plain parameter is the transpose, [E, K, N]; gate and up alternate along N. Everything else stays plain.
"""

from __future__ import annotations

import torch

from ..policy.formats import MXFP4, Format
from .errors import Invalid
from .folder import Folder
from .layout import Group, Layout, Pieces, Written, need
from .stored import Stored, stored

U8 = torch.uint8


class GptOss(Layout):
    """See the module."""

    name, formats, stacked, experts_only, transposed = "gpt-oss", (MXFP4,), True, True, True
    roles = {"_blocks": "blocks", "_scales": "scales"}

    def claims(self, folder: Folder) -> bool:
        return any(name.endswith(("_proj_blocks", "_proj_scales")) for name in folder.slots)

    def packed_format(self, name: str, group: Group, folder: Folder) -> Format:
        need(name, group, folder, blocks=(U8,), scales=(U8, torch.float8_e8m0fnu))
        return MXFP4

    def read(self, name: str, group: Group, folder: Folder, dtype: torch.dtype) -> Stored:
        self.packed_format(name, group, folder)
        blocks, scales = folder.read(group["blocks"]), folder.read(group["scales"])
        if blocks.dim() != 4 or blocks.shape[-1] != MXFP4.block // 2:
            raise Invalid(f"{folder.path}: {group['blocks']!r} is {tuple(blocks.shape)}; accepted: [E, N, K/32, 16]")
        return stored(f"{folder.path}: {name!r}", MXFP4, blocks.flatten(-2), scales, None, dtype)

    def write(self, name: str, weight: Stored) -> Pieces:
        q = weight.q
        blocks = q.codes.unflatten(-1, (-1, MXFP4.block // 2))
        return Pieces({f"{name}_blocks": blocks, f"{name}_scales": q.scales.view(U8)})

    def describe(self, config: dict, written: Written) -> dict[str, dict]:
        plain = sorted(name.removesuffix(".weight") for name in written.plain)
        return {
            "config.json": config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": plain}}
        }
