"""Layout "compressed-tensors": formats nvfp4-pack-quantized, mxfp4-pack-quantized and mxfp8-quantized.

    nvfp4   weight_packed u8 [N, K/2]   weight_scale e4m3 [N, K/16]   weight_global_scale f32 [1], a divisor g
    mxfp4   weight_packed u8 [N, K/2]   weight_scale u8 [N, K/32]
    mxfp8   weight e4m3 [N, K]          weight_scale u8 [N, K/32]

The divisor has shape [1] on purpose: a 0-d tensor takes the dtype of what it meets in torch, so a reader that decodes
with bf16 block scales would divide in bf16. Experts are modules of their own, each projection by itself.
"""

from __future__ import annotations

import torch

from ..formats import MXFP4, MXFP8, NVFP4
from .errors import Refused
from .folder import Folder
from .layout import Layout, Pieces, need, number
from .stored import STOCK, Outer, stored

U8, E4M3, E8M0 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu
NAMES = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}


class CompressedTensors(Layout):
    """See the module."""

    name, formats = "compressed-tensors", (NVFP4, MXFP4, MXFP8)
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
        method = folder.config.get("quantization_config")
        modelopt = folder.quant_config or (isinstance(method, dict) and method.get("quant_method") == "modelopt")
        return not modelopt and any(
            name.endswith(".weight_scale") and f"{name.removesuffix('_scale')}_scale_2" not in folder.slots
            for name in folder.slots
        )

    def base(self, prefix: str) -> str:
        return f"{prefix}.weight"

    def format(self, name, group, folder):
        if group.keys() == {"plain"}:
            return None
        need_scale = {"scale": (E4M3, U8, E8M0)}
        if "packed" not in group:
            need(name, group, folder, plain=(E4M3,), scale=(U8, E8M0))
            return MXFP8
        extra = {"input_scale": (torch.float32,)} if "input_scale" in group else {}
        if "scale" in group and folder.slots[group["scale"]].dtype != E4M3:
            need(name, group, folder, packed=(U8,), **need_scale, **extra)
            return MXFP4
        need(name, group, folder, packed=(U8,), **need_scale, global_scale=(torch.float32,), **extra)
        return NVFP4

    def read(self, name, group, folder, dtype):
        fmt = self.format(name, group, folder)
        codes, scales = folder.read(group["plain" if fmt is MXFP8 else "packed"]), folder.read(group["scale"])
        outer = None
        if fmt is NVFP4:
            g = folder.read(group["global_scale"])
            outer = Outer(torch.ones_like(g), g)
        amax = STOCK / number(folder, group["input_scale"]) if "input_scale" in group else None
        return stored(f"{folder.path}: {name!r}", fmt, codes, scales, outer, dtype, amax)

    def why_not(self, name, weight_format):
        if not name.endswith(".weight"):
            return f"{self.name} holds modules' weights, whose names end with .weight"
        return super().why_not(name, weight_format)

    def write(self, name, weight):
        prefix, lost = name.removesuffix("weight"), None
        q = weight.q
        if q.format is MXFP8:
            return Pieces({name: q.codes, f"{prefix}weight_scale": q.scales.view(U8)})
        if q.format is MXFP4:
            return Pieces({f"{prefix}weight_packed": q.codes, f"{prefix}weight_scale": q.scales.view(U8)})
        if bool((weight.outer.numerator == 0).any()):  # a dead expert: 1/0 is no divisor
            weight = weight.without_zero_scales()
        g, exact = weight.outer.as_divisor()
        if not bool(((g > 0) & g.isfinite()).all()):
            what = f"outer scale {weight.outer.value.item():.3g} has no fp32 divisor"
            raise Refused(f"{name!r}: {what}; accepted: a normal number")
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

    def describe(self, config, written):
        used = sorted(set(written.formats.values()))
        modules = {fmt: sorted(_module(name) for name, f in written.formats.items() if f == fmt) for fmt in used}
        groups = {}
        for i, fmt in enumerate(used):
            # One format: every Linear but the ignored ones, as readers that fuse layers expect. Several: by name.
            targets = ["Linear"] if len(used) == 1 else modules[fmt]
            inputs = (
                _args(fmt, local=True) if written.with_input_amax == len(written.formats) and fmt == "nvfp4" else None
            )
            groups[f"group_{i}"] = {
                "targets": targets,
                "weights": _args(fmt),
                "input_activations": inputs,
                "output_activations": None,
                "format": NAMES[fmt],
            }
        about = {
            "quant_method": "compressed-tensors",
            "format": NAMES[used[0]] if len(used) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted(map(_module, written.plain)),
            "kv_cache_scheme": None,
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


def _module(name: str) -> str:
    return name.removesuffix(".weight")
