"""Layout "inkling": NVFP4 experts, stacked, with dotted companions.

experts.w13_weight u8 [E, 2F, D/2], rows g0, u0, g1, u1, …   experts.w2_weight u8 [E, D, F/2]
.scale e4m3 [E, N, K/16]   .scale2 f32 [E], a multiplier   .input_amax bf16 [1]   .original_shape i64 [3]
"""

from __future__ import annotations

import torch

from ..policy.formats import NVFP4, Format
from .errors import Invalid
from .folder import Folder
from .layout import Group, Layout, Pieces, need, number
from .stored import Outer, Stored, stored

WEIGHTS = ("w13_weight", "w2_weight")


class Inkling(Layout):
    """See the module."""

    name, formats, stacked, experts_only = "inkling", (NVFP4,), True, True
    roles = {"scale": "scale", "scale2": "scale2", "input_amax": "input_amax", "original_shape": "shape"}

    def claims(self, folder: Folder) -> bool:
        return any(name.endswith(tuple(f"{weight}.scale" for weight in WEIGHTS)) for name in folder.slots)

    def split(self, tensor: str) -> tuple[str, str]:
        head, _, tail = tensor.rpartition(".")
        if tail in self.roles and head.endswith(WEIGHTS):
            return head, self.roles[tail]
        return tensor, "plain"

    def packed_format(self, name: str, group: Group, folder: Folder) -> Format:
        optional = {"input_amax": (torch.bfloat16, torch.float32), "shape": (torch.int64,)}
        extra: dict[str, tuple[torch.dtype, ...]] = {role: kinds for role, kinds in optional.items() if role in group}
        need(name, group, folder, plain=(torch.uint8,), scale=(torch.float8_e4m3fn,), scale2=(torch.float32,), **extra)
        return NVFP4

    def read(self, name: str, group: Group, folder: Folder, dtype: torch.dtype) -> Stored:
        self.packed_format(name, group, folder)
        codes, scales = folder.read(group["plain"]), folder.read(group["scale"])
        outer = Outer(folder.read(group["scale2"]))
        amax = number(folder, group["input_amax"]) if "input_amax" in group else None
        weight = stored(f"{folder.path}: {name!r}", NVFP4, codes, scales, outer, dtype, amax)
        said = folder.read(group["shape"]).tolist() if "shape" in group else list(weight.q.shape)
        if said != list(weight.q.shape):
            what = f"{group['shape']!r} says {said}"
            raise Invalid(f"{folder.path}: {what}; accepted: {list(weight.q.shape)}, as the codes")
        return weight

    def write(self, name: str, weight: Stored) -> Pieces:
        m, exact = weight.nvfp4_outer.as_multiplier()
        lost = None if exact else "scale2 is rounded to fp32 (relative 2^-24)"
        tensors = {
            name: weight.q.codes,
            f"{name}.scale": weight.q.scales,
            f"{name}.scale2": m,
            f"{name}.original_shape": torch.tensor(weight.q.shape),
        }
        if weight.input_amax is not None:
            tensors[f"{name}.input_amax"] = weight.input_amax.reshape(1).bfloat16()
            if tensors[f"{name}.input_amax"].float().item() != weight.input_amax.item():
                rounded = "input_amax is rounded to BF16 (relative 2^-9)"
                lost = rounded if lost is None else f"{lost}; {rounded}"
        return Pieces(tensors, lost=lost)
