"""FP8 weights of a checkpoint: E4M3 or E5M2 elements, and a scale for the tensor, each row, or each block.

    weight float8 [.., N, K]   weight_scale (or weight_scale_inv) float32, bfloat16, float16 or e8m0, a multiplier:
        one number               the whole matrix
        [N] or [N, 1]            a row each
        [⌈N/128⌉, ⌈K/128⌉]       a block each, of 128×128 or what the config's weight_block_size says
    input_scale (or activation_scale) float32, opt.

Both names of the scale mean ŵ = element · scale. No fp4ext op multiplies in FP8: these weights keep their bytes in a
conversion, and a loaded layer dequantizes them (fp8_linear.py). They stand beside the weights of any layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import Invalid
from .folder import Folder

ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
BLOCK = (128, 128)
MX_BLOCK = 32


@dataclass(frozen=True, eq=False)
class Fp8:
    """An FP8 weight: ŵ = codes · scale, computed in fp32 and rounded once.

    Attributes:
        codes: float8_e4m3fn or float8_e5m2, [N, K] or a stack [E, N, K].
        scale: as in the file.
        block: how many rows and columns share a scale; None where all of a matrix does.
        dtype: what dequantize gives by default.
        input_scale: that of the inputs, as in the file, where calibration measured one.
        names: role → the tensor's name in the file.
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int] | None
    dtype: torch.dtype = torch.bfloat16
    input_scale: Tensor | None = None
    names: dict[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.nbytes for t in (self.codes, self.scale, self.input_scale) if t is not None)

    @property
    def strategy(self) -> str:
        """ "tensor", "channel" or "block"."""
        return "tensor" if self.block is None else "channel" if self.block == (1, self.shape[-1]) else "block"

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the scales of blocks, [.., ⌈N/rows⌉, ⌈K/columns⌉]."""
        *stack, n, k = self.shape
        rows, columns = self.block or (n, k)
        return (*stack, -(-n // rows), -(-k // columns))

    @property
    def kind(self) -> str:
        """A name for people: "fp8_e4m3/block128x128"."""
        size = f"{self.block[0]}x{self.block[1]}" if self.block is not None and self.strategy == "block" else ""
        return f"fp8_{ELEMENTS[self.codes.dtype]}/{self.strategy}{size}"

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """ŵ, of the codes' shape, in `dtype` (default: self.dtype)."""
        *stack, n, k = self.shape
        scale = self.scale.float()
        if self.block is None:
            scale = scale.reshape(*stack, 1, 1) if scale.numel() > 1 else scale.reshape(())
        else:
            rows, columns = self.block
            scale = scale.reshape(*stack, -(-n // rows), -(-k // columns))
            scale = scale.repeat_interleave(rows, -2)[..., :n, :]
            scale = scale if columns >= k else scale.repeat_interleave(columns, -1)[..., :k]
        return (self.codes.float() * scale).to(dtype or self.dtype)


Pieces = dict[str, str]  # role → tensor name


def find(folder: Folder) -> dict[str, Pieces]:
    """The FP8 weights of a folder, by the dtypes and shapes in its headers: weight name → its pieces by role.

    Raises:
        Refused: a zero point, or a scale before quantization, beside such a weight.
    """
    found = {}
    for name, slot in folder.slots.items():
        if slot.dtype not in ELEMENTS or len(slot.shape) not in (2, 3):
            continue
        scale = next((s for s in _near(name, "scale_inv", "scale") if _is_scale(folder, s, slot.shape)), None)
        if scale is None:
            continue
        for odd in _near(name, "zero_point", "pre_quant_scale"):
            if odd in folder.slots:
                raise Invalid(f"{folder.path}: {odd!r} has no meaning beside FP8 codes; accepted: symmetric FP8")
        found[name] = {"codes": name, "scale": scale}
        inputs = next((s for s in _near(name, "input_scale", "activation_scale") if s in folder.slots), None)
        if inputs is not None:
            found[name]["input_scale"] = inputs
        marker = f"{name.removesuffix('.weight')}.comfy_quant"
        if name.endswith(".weight") and marker in folder.slots:
            found[name]["marker"] = marker
    return found


def _near(name: str, *whats: str) -> list[str]:
    """Where a companion may be: weight_scale; for a module's weight also module.scale."""
    own = [f"{name}_{what}" for what in whats]
    return own + [f"{name.removesuffix('weight')}{what}" for what in whats if name.endswith(".weight")]


def _is_scale(folder: Folder, name: str, shape: tuple[int, ...]) -> bool:
    slot = folder.slots.get(name)
    if slot is None or slot.dtype not in SCALES:
        return False
    return slot.dtype != torch.float8_e8m0fnu or slot.shape != (*shape[:-1], shape[-1] // MX_BLOCK)  # that is MXFP8


def block_of(folder: Folder, name: str, pieces: Pieces) -> tuple[int, int] | None:
    """What shares a scale, by the shapes: (rows, columns), None for a whole matrix. Raises Refused for others."""
    *stack, n, k = folder.slots[name].shape
    given = folder.slots[pieces["scale"]].shape
    shape = tuple(d for d in given if d != 1) if len(given) > len(stack) + 2 else given
    total = math.prod(given)
    if total == 1 and len(given) >= 2 and max(n, k) > 1:  # a matrix of one block, in a checkpoint of blocks
        named = pieces["scale"].endswith("_inv") or len(given) == 4
        for rows, columns in (*_declared(folder.quantization), *([BLOCK] if named else [])):
            if n <= rows and k <= columns and not stack:
                return rows, columns
    if total == 1 or (stack and given in ((stack[0],), (stack[0], 1, 1))):
        return None
    if shape in ((*stack, n), (*stack, n, 1)):
        return 1, k
    for rows, columns in (*_declared(folder.quantization), BLOCK, (1, BLOCK[1])):
        if shape == (*stack, -(-n // rows), -(-k // columns)) or (
            len(given) > len(stack) + 2 and total == -(-n // rows) * -(-k // columns) * (stack[0] if stack else 1)
        ):
            return rows, columns
    raise Invalid(
        f"{folder.path}: {pieces['scale']!r} is {given} beside FP8 codes {(*stack, n, k)}; accepted: one scale, one a "
        f"row, or one a block of 128×128 or of the config's weight_block_size"
    )


def _declared(about: dict) -> list[tuple[int, int]]:
    """The block sizes that a quantization_config names."""
    groups = about.get("config_groups")
    found = [about.get("weight_block_size")]
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        found.append(weights.get("block_structure") if isinstance(weights, dict) else None)
    return [
        (size[0], size[1])
        for size in found
        if isinstance(size, list) and len(size) == 2 and all(type(d) is int and 0 < d < 2**31 for d in size)
    ]


def read(folder: Folder, name: str, pieces: Pieces, dtype: torch.dtype) -> Fp8:
    """An FP8 weight, checked.

    Raises:
        Refused: a scale that is negative or not finite, an element that is NaN or infinite, a value that overflows.
    """
    block = block_of(folder, name, pieces)
    codes, scale = folder.read(name), folder.read(pieces["scale"])
    inputs = folder.read(pieces["input_scale"]) if "input_scale" in pieces else None
    for tensor, values in ((pieces["scale"], scale), (pieces.get("input_scale"), inputs)):
        if values is not None and not bool((values.float().isfinite() & (values.float() >= 0)).all()):
            raise Invalid(
                f"{folder.path}: {tensor!r} holds a scale that is negative or not finite; accepted: numbers ≥ 0"
            )
    weight = Fp8(codes, scale, block, dtype, inputs, {role: t for role, t in pieces.items() if role != "marker"})
    if not bool(codes.float().isfinite().all()):
        raise Invalid(f"{folder.path}: {name!r}: an element is NaN or infinite; accepted: finite values")
    if not bool(weight.dequantize(dtype).isfinite().all()):
        raise Invalid(
            f"{folder.path}: {name!r}: an element times its scale overflows {dtype}; accepted: finite weights"
        )
    return weight
