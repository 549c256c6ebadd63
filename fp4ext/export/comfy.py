"""What ComfyUI's kind of file says beside its tensors, without which its NVFP4 weights are misread.

    NAME.comfy_quant u8                    JSON {"format": "nvfp4"}, ComfyUI's own files
    metadata _quantization_metadata        JSON {"layers": {NAME: {"format": "nvfp4"}}}, older ones and modelopt's

Names and dtypes are modelopt's, but the block scales are swizzled: [⌈N⌉128, ⌈K/16⌉4] in the order of the tensor cores
(docs/numerics.md, 10). ComfyUI packs the even element in the high nibble; modelopt, which writes its
quantization_config into the metadata too, packs it in the low one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path

from torch import Tensor

from .errors import Invalid
from .header import Slot, parse_json

MARKER = ".comfy_quant"
MAX_MARKER = 4096  # bytes
KNOWN = ("nvfp4", "float8_e4m3fn", "float8_e5m2")
OF_MODELOPT = ("nvfp4", "fp8", "w4a16_nvfp4", "nvfp4_awq", "mixed_precision")


class Nibbles(Enum):
    """Where the even element of a byte lies, in a file whose block scales are swizzled."""

    LOW, HIGH, UNSAID = "low", "high", "unsaid"


def markers(
    path: Path, metadata: dict[str, str], slots: dict[str, Slot], read: Callable[[str], Tensor]
) -> dict[str, Nibbles]:
    """Module name → the order of its nibbles, for the modules that a checkpoint's markers or metadata name.

    Raises:
        Refused: a marker that is no JSON object, or one of another format or with a rotation, which is named.
    """
    found: dict[str, Nibbles] = {}
    said = metadata.get("_quantization_metadata")
    if said is not None:
        of_modelopt = "quantization_config" in metadata
        layers = parse_json(said.encode(), path)
        layers = layers.get("layers") if isinstance(layers, dict) else None
        if not isinstance(layers, dict):
            raise Invalid(f"{path}: _quantization_metadata has no layers; accepted: an object, name → format")
        for module, about in layers.items():
            _check(f"{path}: _quantization_metadata of {module!r}", about, OF_MODELOPT if of_modelopt else KNOWN)
            found[module] = Nibbles.LOW if of_modelopt else Nibbles.UNSAID
    for name, slot in slots.items():
        if name.endswith(MARKER):
            if slot.nbytes > MAX_MARKER or slot.dtype.itemsize != 1:
                raise Invalid(f"{path}: {name!r} takes {slot.nbytes} bytes; accepted: at most {MAX_MARKER}, uint8")
            _check(f"{path}: {name!r}", parse_json(bytes(read(name).flatten().tolist()), path), KNOWN)
            found[name.removesuffix(MARKER)] = Nibbles.HIGH
    return found


def _check(what: str, about: object, known: tuple[str, ...]) -> None:
    about = about if isinstance(about, dict) else {}
    fmt = about.get("format")
    if fmt not in known:
        raise Invalid(f"{what} says format {fmt!r}; accepted: {', '.join(known)}")
    rotated = next((key for key, value in about.items() if "rot" in key.lower() and value), None)
    if rotated is not None:
        raise Invalid(f"{what} says {rotated!r}: its weights want rotated inputs; accepted: weights without rotations")
