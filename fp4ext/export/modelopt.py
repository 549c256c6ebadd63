"""Layout "modelopt": NVFP4 (and MXFP8) as NVIDIA's Model Optimizer exports them.

    nvfp4   weight u8 [N, K/2]    weight_scale e4m3 [N, K/16]   weight_scale_2 f32 [], a multiplier
            input_scale f32 [] = input amax / 2688, where calibration measured one
    mxfp8   weight e4m3 [N, K]    weight_scale u8 [N, K/32]

hf_quant_config.json names the algorithm and the modules that stay plain. Without input scales the algorithm is
W4A16_NVFP4: readers of NVFP4 expect them.
"""

from __future__ import annotations

import torch

from .. import __version__
from ..formats import MXFP8, NVFP4
from .folder import Folder
from .layout import Layout, Pieces, need, number
from .stored import STOCK, Outer, stored

U8, E4M3, E8M0, F32 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32


class ModelOpt(Layout):
    """See the module."""

    name, formats = "modelopt", (NVFP4, MXFP8)
    roles = {
        ".weight_scale": "scale",
        ".weight_scale_2": "scale_2",
        ".input_scale": "input_scale",
        ".pre_quant_scale": "pre_quant_scale",  # it would change what the weight means: refused
        ".weight": "plain",
    }

    def claims(self, folder: Folder) -> bool:
        if any(name.endswith(".weight_scale_2") for name in folder.slots):
            return True
        method = folder.config.get("quantization_config")
        modelopt = folder.quant_config or (isinstance(method, dict) and method.get("quant_method") == "modelopt")
        return bool(modelopt) and any(name.endswith(".weight_scale") for name in folder.slots)

    def base(self, prefix: str) -> str:
        return f"{prefix}.weight"

    def format(self, name, group, folder):
        if group.keys() == {"plain"}:
            return None
        extra = {"input_scale": (F32,)} if "input_scale" in group else {}
        if "scale" in group and folder.slots[group["scale"]].dtype in (U8, E8M0):
            need(name, group, folder, plain=(E4M3,), scale=(U8, E8M0), **extra)
            return MXFP8
        need(name, group, folder, plain=(U8,), scale=(E4M3,), scale_2=(F32,), **extra)
        return NVFP4

    def read(self, name, group, folder, dtype):
        fmt = self.format(name, group, folder)
        codes, scales = folder.read(group["plain"]), folder.read(group["scale"])
        outer = Outer(folder.read(group["scale_2"])) if fmt is NVFP4 else None
        amax = number(folder, group["input_scale"]) * STOCK if "input_scale" in group else None
        return stored(f"{folder.path}: {name!r}", fmt, codes, scales, outer, dtype, amax)

    def why_not(self, name, weight_format):
        if not name.endswith(".weight"):
            return f"{self.name} holds modules' weights, whose names end with .weight"
        return super().why_not(name, weight_format)

    def write(self, name, weight):
        q = weight.q
        if q.format is MXFP8:
            return Pieces({name: q.codes, f"{name}_scale": q.scales.view(U8)})
        m, exact = weight.outer.as_multiplier()
        lost = None if exact else "weight_scale_2 is rounded to fp32 (relative 2^-24)"
        tensors = {name: q.codes, f"{name}_scale": q.scales, f"{name}_scale_2": m.reshape(())}
        if weight.input_amax is not None:
            tensors[f"{name.removesuffix('weight')}input_scale"] = weight.input_amax / STOCK
        return Pieces(tensors, lost=lost)

    def describe(self, config, written):
        used = sorted(set(written.formats.values()))
        nvfp4 = "NVFP4" if written.with_input_amax == len(written.formats) else "W4A16_NVFP4"
        algo = {"nvfp4": {"quant_algo": nvfp4, "group_size": 16}, "mxfp8": {"quant_algo": "MXFP8", "group_size": 32}}
        exclude = sorted(name.removesuffix(".weight") for name in written.plain)
        about = {"kv_cache_quant_algo": None, "exclude_modules": exclude}
        if len(used) == 1:
            about = algo[used[0]] | about
        else:
            layers = {name.removesuffix(".weight"): algo[fmt] for name, fmt in sorted(written.formats.items())}
            about = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers} | about
        producer = {"name": "fp4ext", "version": __version__}
        groups = {}
        for i, fmt in enumerate(used):
            names = sorted(name.removesuffix(".weight") for name, f in written.formats.items() if f == fmt)
            args = {"dynamic": False, "num_bits": 4 if fmt == "nvfp4" else 8, "type": "float"}
            args["group_size"] = algo[fmt]["group_size"]
            inputs = {} if algo[fmt]["quant_algo"] == "W4A16_NVFP4" else {"input_activations": args}
            groups[f"group_{i}"] = inputs | {"weights": args, "targets": ["Linear"] if len(used) == 1 else names}
        method = {
            "config_groups": groups,
            "ignore": exclude,
            "quant_algo": about["quant_algo"],
            "producer": producer,
            "quant_method": "modelopt",
        }
        return {
            "hf_quant_config.json": {"producer": producer, "quantization": about},
            "config.json": config | {"quantization_config": method},
        }
