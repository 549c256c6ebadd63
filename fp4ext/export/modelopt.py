"""Layout "modelopt": NVFP4 (and MXFP8) as NVIDIA's Model Optimizer exports them.

    nvfp4   weight u8 [N, K/2]    weight_scale e4m3 [N, K/16]   weight_scale_2 f32 [], a multiplier
            input_scale f32 [] = input amax / 2688, where calibration measured one
    mxfp8   weight e4m3 [N, K]    weight_scale u8 [N, K/32]

hf_quant_config.json names the algorithm and the modules that stay plain. Without input scales the algorithm is
W4A16_NVFP4: readers of NVFP4 expect them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import __version__
from ..functional import ops
from ..policy.formats import MXFP8, NVFP4, Format
from .comfy import Nibbles
from .errors import Invalid
from .folder import Folder
from .fp8 import Fp8
from .layout import Group, Layout, Pieces, Written, need, number
from .stored import STOCK, Outer, Stored, stored

U8, E4M3, E8M0, F32 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32
# modelopt's words. Those without an entry in GROUPS have scales of a tensor, of rows, or of blocks of 128×128.
FP8_ALGOS = {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO"}
GROUPS = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}
WEIGHT_ONLY = ("W4A16_NVFP4", "FP8_PB_WO")


class ModelOpt(Layout):
    """See the module."""

    name, formats, says_kv_cache, of_modules = "modelopt", (NVFP4, MXFP8), True, True
    roles = {
        ".weight_scale": "scale",
        ".weight_scale_2": "scale_2",
        ".input_scale": "input_scale",
        ".comfy_quant": "comfy",  # see comfy.py
        ".pre_quant_scale": "pre_quant_scale",  # it would change what the weight means: refused
        ".weight": "plain",
    }

    def claims(self, folder: Folder) -> bool:
        if any(name.endswith(".weight_scale_2") for name in folder.slots):
            return True
        return folder.is_of_modelopt and any(name.endswith(".weight_scale") for name in folder.slots)

    def packed_format(self, name: str, group: Group, folder: Folder) -> Format:
        extra = {"input_scale": (F32,)} if "input_scale" in group else {}
        extra |= {"comfy": (U8,)} if "comfy" in group else {}
        if "scale" in group and folder.slots[group["scale"]].dtype in (U8, E8M0):
            need(name, group, folder, plain=(E4M3,), scale=(U8, E8M0), **extra)
            return MXFP8
        need(name, group, folder, plain=(U8,), scale=(E4M3,), scale_2=(F32,), **extra)
        return NVFP4

    def shape(self, name: str, group: Group, folder: Folder, fmt: Format) -> tuple[int, ...]:
        *rows, packed = folder.slots[group["plain"]].shape or (0,)
        return (*rows, packed * fmt.codes_per_byte)

    def read(self, name: str, group: Group, folder: Folder, dtype: torch.dtype) -> Stored:
        fmt = self.packed_format(name, group, folder)
        codes, scales = folder.read(group["plain"]), folder.read(group["scale"])
        nibbles = folder.comfy.get(name.removesuffix(".weight"))
        if nibbles is not None and fmt is NVFP4:
            codes, scales = _unswizzled(f"{folder.path}: {name!r}", codes, scales, nibbles)
        outer = Outer(folder.read(group["scale_2"])) if fmt is NVFP4 else None
        amax = number(folder, group["input_scale"]) * STOCK if "input_scale" in group else None
        return stored(f"{folder.path}: {name!r}", fmt, codes, scales, outer, dtype, amax)

    def write(self, name: str, weight: Stored) -> Pieces:
        q = weight.q
        if q.format is MXFP8:
            return Pieces({name: q.codes, f"{name}_scale": q.scales.view(U8)})
        m, exact = weight.nvfp4_outer.as_multiplier()
        lost = None if exact else "weight_scale_2 is rounded to fp32 (relative 2^-24)"
        tensors = {name: q.codes, f"{name}_scale": q.scales, f"{name}_scale_2": m}
        if weight.input_amax is not None:
            tensors[f"{name.removesuffix('weight')}input_scale"] = weight.input_amax / STOCK
        return Pieces(tensors, lost=lost)

    def write_fp8(self, name: str, weight: Fp8) -> Pieces:
        if not name.endswith(".weight"):
            raise Invalid(
                f"{name!r}: {weight.kind}; accepted in {self.name}: modules' weights, whose names end with .weight"
            )
        stack = weight.shape[:-2]
        shape = {"tensor": stack, "channel": (*stack, weight.shape[-2]), "block": weight.grid}[weight.strategy]
        tensors = {name: weight.codes, f"{name}_scale": weight.scale.reshape(shape if weight.scale.numel() > 1 else ())}
        if weight.input_scale is not None:
            tensors[f"{name.removesuffix('weight')}input_scale"] = weight.input_scale.squeeze()
        return Pieces(tensors)

    def describe(self, config: dict, written: Written) -> dict[str, dict]:
        algos = {name: _algo(fmt, name in written.with_inputs) for name, fmt in written.formats.items()}
        algos |= {name: FP8_ALGOS[weight.strategy] for name, weight in written.fp8.items()}
        layers = {name.removesuffix(".weight"): algo for name, algo in sorted(algos.items())}
        used = sorted(set(algos.values()))
        about: dict[str, dict] = {
            name: {"quant_algo": name} | ({"group_size": GROUPS[name]} if name in GROUPS else {}) for name in used
        }
        kv_cache = written.kv_cache
        exclude = sorted(name.removesuffix(".weight") for name in written.plain)
        rest = {"kv_cache_quant_algo": None if kv_cache is None else kv_cache.algo, "exclude_modules": exclude}
        if len(used) == 1:
            whole: dict = about[used[0]] | rest
        else:
            whole = {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {n: about[a] for n, a in layers.items()},
            } | rest
        producer = {"name": "fp4ext", "version": __version__}
        groups = {}
        for i, algo in enumerate(used):
            args = {"dynamic": False, "num_bits": 4 if "NVFP4" in algo else 8, "type": "float"}
            args |= {"group_size": GROUPS[algo]} if algo in GROUPS else {}
            inputs = {} if algo in WEIGHT_ONLY else {"input_activations": args}
            names = ["Linear"] if len(used) == 1 else [n for n, a in layers.items() if a == algo]
            groups[f"group_{i}"] = inputs | {"weights": args, "targets": names}
        method = {
            "config_groups": groups,
            "ignore": exclude,
            "quant_algo": whole["quant_algo"],
            "producer": producer,
            "quant_method": "modelopt",
        }
        if kv_cache is not None:
            method["kv_cache_scheme"] = kv_cache.scheme
        return {
            "hf_quant_config.json": {"producer": producer, "quantization": whole},
            "config.json": config | {"quantization_config": method},
        }


def _algo(fmt: str, with_inputs: bool) -> str:
    return {"mxfp8": "MXFP8"}.get(fmt, "NVFP4" if with_inputs else "W4A16_NVFP4")


def _unswizzled(what: str, codes: Tensor, scales: Tensor, nibbles: Nibbles) -> tuple[Tensor, Tensor]:
    """Codes and block scales as all other layouts have them."""
    if codes.dim() != 2 or scales.dim() != 2:
        raise Invalid(f"{what}: codes {tuple(codes.shape)} in a file for ComfyUI; accepted: [N, K/2]")
    n, blocks = codes.shape[0], codes.shape[1] // 8
    padded = (-(-n // 128) * 128, -(-blocks // 4) * 4)
    if tuple(scales.shape) == padded:
        if nibbles is Nibbles.UNSAID:
            raise Invalid(
                f"{what}: its block scales are swizzled, and nothing says which nibble is the even element; accepted: "
                "beside _quantization_metadata, ComfyUI's .comfy_quant tensors or modelopt's quantization_config"
            )
        scales = ops.unswizzle(scales.contiguous().flatten(), n, blocks)
    elif nibbles is Nibbles.HIGH:
        raise Invalid(f"{what}: scales {tuple(scales.shape)}; accepted: {padded}, swizzled, as ComfyUI writes them")
    if nibbles is Nibbles.HIGH:
        codes = codes << 4 | codes >> 4
    return codes, scales
