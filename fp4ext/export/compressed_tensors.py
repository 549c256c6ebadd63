"""Layout "compressed-tensors": formats nvfp4-pack-quantized, mxfp4-pack-quantized and mxfp8-quantized.

    nvfp4   weight_packed u8 [N, K/2]   weight_scale e4m3 [N, K/16]   weight_global_scale f32 [1], a divisor g
    mxfp4   weight_packed u8 [N, K/2]   weight_scale u8 [N, K/32]
    mxfp8   weight e4m3 [N, K]          weight_scale u8 [N, K/32]

The divisor has shape [1] on purpose: a 0-d tensor takes the dtype of what it meets in torch, so a reader that decodes
with bf16 block scales would divide in bf16. Experts are modules of their own, each projection by itself.
"""

from __future__ import annotations

import torch

from ..policy.formats import MXFP4, MXFP8, NVFP4, Format
from .errors import Invalid
from .folder import Folder
from .fp8 import Fp8
from .layout import Group, Layout, Pieces, Written, need, number
from .stored import STOCK, Outer, Stored, stored

U8, E4M3, E8M0 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu
NAMES = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}


class CompressedTensors(Layout):
    """See the module."""

    name, formats, says_kv_cache, of_modules = "compressed-tensors", (NVFP4, MXFP4, MXFP8), True, True
    roles = {
        ".weight_packed": "packed",
        ".weight_scale": "scale",
        ".weight_global_scale": "global_scale",
        ".input_global_scale": "input_scale",
        ".weight_zero_point": "zero_point",  # none of these formats has one: refused beside their pieces
        ".weight": "plain",
    }

    def claims(self, folder: Folder) -> bool:
        if any(name.endswith(".weight_packed") for name in folder.slots):
            return True
        return not folder.is_of_modelopt and any(
            name.endswith(".weight_scale") and f"{name.removesuffix('_scale')}_scale_2" not in folder.slots
            for name in folder.slots
        )

    def packed_format(self, name: str, group: Group, folder: Folder) -> Format:
        need_scale = {"scale": (E4M3, U8, E8M0)}
        if "packed" not in group:
            need(name, group, folder, plain=(E4M3,), scale=(U8, E8M0))
            return MXFP8
        extra = {"input_scale": (torch.float32,)} if "input_scale" in group else {}
        if "scale" in group and folder.slots[group["scale"]].dtype == U8 and folder.slots[group["packed"]].dtype == U8:
            self._check_mx_scale(group, folder)
        if "scale" in group and folder.slots[group["scale"]].dtype != E4M3:
            need(name, group, folder, packed=(U8,), **need_scale, **extra)
            return MXFP4
        need(name, group, folder, packed=(U8,), **need_scale, global_scale=(torch.float32,), **extra)
        return NVFP4

    def _check_mx_scale(self, group: Group, folder: Folder) -> None:
        """Bytes beside packed codes are MXFP4's scales only where there is one for 32 elements and no outer scale."""
        codes, scales = (folder.slots[group[role]].shape for role in ("packed", "scale"))
        nvfp4 = bool(codes and scales) and scales[-1] * 16 == codes[-1] * 2 and codes[-1] > 0
        if "global_scale" in group or nvfp4:
            what = f"{group['scale']!r} is uint8, where NVFP4 has float8_e4m3fn"
            raise Invalid(f"{folder.path}: {what}; accepted: uint8 scales of MXFP4, one for 32 elements, and no other")

    def read(self, name: str, group: Group, folder: Folder, dtype: torch.dtype) -> Stored:
        fmt = self.packed_format(name, group, folder)
        codes, scales = folder.read(group["plain" if fmt is MXFP8 else "packed"]), folder.read(group["scale"])
        outer = None
        if fmt is NVFP4:
            g = folder.read(group["global_scale"])
            outer = Outer(torch.ones_like(g), g)
        amax = STOCK / number(folder, group["input_scale"]) if "input_scale" in group else None
        return stored(f"{folder.path}: {name!r}", fmt, codes, scales, outer, dtype, amax)

    def write(self, name: str, weight: Stored) -> Pieces:
        prefix, lost = name.removesuffix("weight"), None
        q = weight.q
        if len(q.shape) != 2:
            raise Invalid(f"{name!r} is a stack {tuple(q.shape)}; accepted in {self.name}: matrices, or known experts")
        if q.format is MXFP8:
            return Pieces({name: q.codes, f"{prefix}weight_scale": q.scales.view(U8)})
        if q.format is MXFP4:
            return Pieces({f"{prefix}weight_packed": q.codes, f"{prefix}weight_scale": q.scales.view(U8)})
        if bool((weight.nvfp4_outer.numerator == 0).any()):  # a dead expert: 1/0 is no divisor
            weight = weight.without_zero_scales()
        g, exact = weight.nvfp4_outer.as_divisor()
        if not bool(((g > 0) & g.isfinite()).all()):
            what = f"outer scale {weight.nvfp4_outer.value.item():.3g} has no fp32 divisor"
            raise Invalid(f"{name!r}: {what}; accepted: a normal number")
        if not exact:
            lost = "1/global_scale is rounded to fp32 (relative 2^-24)"
        tensors = {
            f"{prefix}weight_packed": weight.q.codes,
            f"{prefix}weight_scale": weight.q.scales,
            f"{prefix}weight_global_scale": g.reshape(1),
        }
        if weight.input_amax is not None:
            tensors[f"{prefix}input_global_scale"] = (STOCK / weight.input_amax).reshape(1)
        return Pieces(tensors, lost=lost)

    def write_fp8(self, name: str, weight: Fp8) -> Pieces:
        prefix = name.removesuffix("weight")
        if not name.endswith(".weight") or len(weight.shape) != 2 or weight.codes.dtype != E4M3:
            raise Invalid(f"{name!r}: {weight.kind} {tuple(weight.shape)}; accepted in {self.name}: E4M3 matrices")
        shape = {"tensor": (1,), "channel": (-1, 1), "block": weight.grid}[weight.strategy]
        tensors = {name: weight.codes, f"{name}_scale": weight.scale.reshape(shape)}
        if weight.input_scale is not None:
            tensors[f"{prefix}input_scale"] = weight.input_scale.reshape(-1)  # [1]: readers want the shape too
        return Pieces(tensors)

    def describe(self, config: dict, written: Written) -> dict[str, dict]:
        kinds: dict[tuple, list[str]] = {}
        for name, fmt in written.formats.items():
            kinds.setdefault((fmt, name in written.with_inputs and fmt == "nvfp4"), []).append(_module(name))
        for name, weight in written.fp8.items():
            kinds.setdefault((weight.kind, weight.input_scale is not None), []).append(_module(name))
        of_kind = {weight.kind: weight for weight in written.fp8.values()}
        groups = {}
        for i, (kind, modules) in enumerate(sorted(kinds.items())):
            fmt, with_inputs = kind
            weights = _fp8_args(of_kind[fmt]) if fmt in of_kind else _args(fmt)
            if fmt in of_kind:
                inputs: dict | None = _fp8_inputs(of_kind[fmt], with_inputs)
            else:
                inputs = _args(fmt, local=True) if with_inputs else None
            groups[f"group_{i}"] = {
                # One kind: every Linear but the ignored ones, as readers that fuse layers expect. Several: by name.
                "targets": ["Linear"] if len(kinds) == 1 else sorted(modules),
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
                "format": NAMES.get(fmt, "float-quantized"),
            }
        used = {group["format"] for group in groups.values()}
        about = {
            "quant_method": "compressed-tensors",
            "format": used.pop() if len(used) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted(map(_module, written.plain)),
            "kv_cache_scheme": None if written.kv_cache is None else written.kv_cache.scheme,
            "global_compression_ratio": None,
        }
        return {"config.json": config | {"quantization_config": about}}


def _args(fmt: str, local: bool = False) -> dict:
    """How its config describes a format."""
    args = {
        "num_bits": 8 if fmt == "mxfp8" else 4,
        "type": "float",
        "strategy": "tensor_group" if fmt == "nvfp4" else "group",
        "group_size": 16 if fmt == "nvfp4" else 32,
        "symmetric": True,
        "dynamic": "local" if local else False,
        "scale_dtype": "torch.float8_e4m3fn" if fmt == "nvfp4" else "torch.uint8",
    }
    return args


def _fp8_args(weight: Fp8) -> dict:
    """How its config describes FP8 weights."""
    args = {"num_bits": 8, "type": "float", "strategy": weight.strategy, "symmetric": True, "dynamic": False}
    if weight.block is not None and weight.strategy == "block":
        return args | {"block_structure": list(weight.block)}
    return args


def _fp8_inputs(weight: Fp8, static: bool) -> dict:
    """How inputs of FP8 weights are quantized: by the scale that is there, else as they come, as readers of them do."""
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    if static:
        return args | {"strategy": "tensor", "dynamic": False}
    if weight.block is not None and weight.strategy == "block":
        return args | {"strategy": "group", "group_size": weight.block[1], "dynamic": True}
    return args | {"strategy": "token", "dynamic": True}


def _module(name: str) -> str:
    return name.removesuffix(".weight")
