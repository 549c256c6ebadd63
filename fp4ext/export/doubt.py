"""What is refused of a checkpoint by its name: schemes that fp4ext does not read, so that none passes for another."""

from __future__ import annotations

import torch

from .errors import Invalid
from .folder import Folder

METHODS = ("compressed-tensors", "modelopt", "mxfp4", "fp8", "fbgemm_fp8", "fp4ext")
# compressed-tensors' names of formats; "dense" and "mixed-precision" leave it to their groups.
CT_FORMATS = (
    "dense",
    "mixed-precision",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "float-quantized",
    "naive-quantized",
)
ROTATIONS = ("transform_config", "rotation_config", "hadamard_config", "spinquant_config", "online_rotation")
READ = "NVFP4, MXFP4, MXFP8 and FP8, in the layouts of docs/interchange.md"


def check_config(folder: Folder) -> None:
    """Raises Refused for a config that names a method, a format or a rotation that fp4ext does not know."""
    parts = [folder.config, folder.config.get("text_config")]
    keys = ("quantization_config", "compression_config")
    said_in = [("config.json", part.get(key)) for part in parts if isinstance(part, dict) for key in keys]
    said_in.append(("hf_quant_config.json", folder.quant_config.get("quantization")))
    for where, said in said_in:
        if not isinstance(said, dict):
            continue
        rotation = next((key for key in ROTATIONS if said.get(key)), None)
        if rotation is not None:
            what = f"{where} has a {rotation}: its weights want inputs that are rotated while the model runs"
            raise Invalid(f"{folder.path}: {what}; accepted: a checkpoint without rotations")
        method = said.get("quant_method")
        if isinstance(method, str) and method not in METHODS:
            raise Invalid(f"{folder.path}: {where} says quant_method {method!r}; accepted: {', '.join(METHODS)}")
        if method == "compressed-tensors":
            groups = said.get("config_groups")
            named = [said, *(groups.values() if isinstance(groups, dict) else ())]
            formats = [group.get("format") for group in named if isinstance(group, dict)]
            odd = next((fmt for fmt in formats if isinstance(fmt, str) and fmt not in CT_FORMATS), None)
            if odd is not None:
                raise Invalid(f"{folder.path}: {where} says format {odd!r}; accepted: {', '.join(CT_FORMATS)}")


def check_codes(folder: Folder) -> None:
    """Raises Refused for codes of a kind that no layout has: int8, or the packed experts of a modelopt gpt-oss."""
    for name, slot in folder.slots.items():
        packed = slot.dtype == torch.uint8 and f"{name}_weight_scale" in folder.slots
        if (packed or slot.dtype == torch.int8) and len(slot.shape) > 1:
            check_plain(folder, name)


def check_plain(folder: Folder, name: str) -> None:
    """Codes without a scale are no weight, and codes of an unknown kind neither: they must not pass for one."""
    slot = folder.slots.get(name)
    if slot is None:
        raise Invalid(f"{folder.path}: {name!r} is missing, a piece that belongs to it is there")
    module = name.removesuffix(".weight")
    near = (f"{name}_weight_scale", f"{name}_scale", f"{module}.scale", f"{module}.weight_scale", f"{module}.scales")
    scale = next((other for other in near if other != name and other in folder.slots), None)
    dtype = _said(slot.dtype)
    if slot.dtype.itemsize == 1 and slot.dtype != torch.bool and scale is not None and len(slot.shape) > 1:
        what = f"{dtype} codes with {_said(folder.slots[scale].dtype)} scales {scale!r}"
        if f"{name}_weight_scale_2" in folder.slots:
            what += ", NVFP4 experts as modelopt exports those of gpt-oss"
        elif slot.dtype == torch.int8 and folder.slots[scale].dtype == torch.float8_e8m0fnu:
            what += ", FP4 as DeepSeek stores it"
        raise Invalid(f"{folder.path}: {name!r} has {what}: not a kind that is read; accepted: {READ}")
    packed = slot.dtype == torch.uint8 and len(slot.shape) > 1 and name.endswith("weight")
    scaled = {f"{name.removesuffix('scale')}weight", name.removesuffix("_scale"), name.removesuffix("_weight_scale")}
    if slot.dtype.itemsize == 1 and (slot.dtype.is_floating_point or packed):
        whose = next((other for other in sorted(scaled) if other != name and other in folder.slots), None)
        if whose is not None:
            return check_plain(folder, whose)
        raise Invalid(
            f"{folder.path}: {name!r} is {dtype}, and no scale of it is there; accepted: a weight with its scales"
        )


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
