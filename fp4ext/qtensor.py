"""QTensor: a quantized matrix, as data.

Frozen and inert: no torch function takes it, so nothing dequantizes it behind your back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import formats, ops
from .formats import Format


@dataclass(frozen=True, eq=False)
class QTensor:
    """A tensor of logical shape `shape` [.., rows, K] in a block format, contraction (K) last.

    Attributes:
        codes: uint8 [.., rows, ⌈K⌉/2] (E2M1, two a byte) or float8 [.., rows, ⌈K⌉]; ⌈K⌉ is K in whole blocks.
        scales: block scales, float8_e4m3fn (NVFP4) or float8_e8m0fnu (MX), [.., rows, ⌈K⌉/block], linear.
        global_scale: fp32 decode multiplier, broadcastable to [.., rows, 1]; None where the format has none.
        format: the Format.
        shape: the logical shape.
        dtype: what dequantize gives by default: the dtype of the tensor it was made from.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    format: Format
    shape: torch.Size
    dtype: torch.dtype = torch.float32

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """x̂ = element · fl(block scale · global scale), [.., rows, K], rounded once to dtype (default: self.dtype).

        After an RHT these are the rotated values.
        """
        return ops.dequantize(*self.stored(), ops.dtype_name(dtype or self.dtype))

    def stored(self) -> tuple[Tensor, Tensor, Tensor, str, int]:
        """Codes, scales, global scale (empty where there is none), format and K: how an op takes a quantized tensor."""
        outer = self.codes.new_empty(0, dtype=torch.float32) if self.global_scale is None else self.global_scale
        return self.codes, self.scales, outer, self.format.name, self.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory: codes, block scales and outer scale."""
        return sum(t.nbytes for t in self.tensors().values())

    @property
    def bits_per_element(self) -> float:
        """Stored bits an element, everything counted; nan for an empty tensor."""
        n = self.shape.numel()
        return 8 * self.nbytes / n if n else float("nan")

    def to(self, device: torch.device | str) -> QTensor:
        """The same on another device. Raises TypeError or RuntimeError for what is no device, such as a dtype."""
        device = torch.device(device)
        return replace(self, **{name: t.to(device) for name, t in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by field."""
        made_of = {"codes": self.codes, "scales": self.scales, "global_scale": self.global_scale}
        return {name: t for name, t in made_of.items() if t is not None}

    def to_safetensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What safetensors.torch.save_file takes: tensors and metadata, their keys starting with `name`."""
        tensors = {f"{name}.{key}": t.contiguous() for key, t in self.tensors().items()}
        shape = ",".join(map(str, self.shape))
        meta = {"format": self.format.name, "shape": shape, "dtype": ops.dtype_name(self.dtype)}
        return tensors, {f"{name}.{key}": value for key, value in meta.items()}

    @classmethod
    def from_safetensors(cls, name: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> QTensor:
        """The inverse of to_safetensors. Raises KeyError (what is missing) or ValueError (what does not fit)."""
        missing = [key for key in (f"{name}.format", f"{name}.shape", f"{name}.dtype") if key not in metadata]
        missing += [key for key in (f"{name}.codes", f"{name}.scales") if key not in tensors]
        if missing:
            raise KeyError(f"no QTensor {name!r} here: missing {', '.join(missing)}")
        fmt = formats.get(metadata[f"{name}.format"])
        if fmt.has_global_scale and f"{name}.global_scale" not in tensors:
            raise KeyError(f"{name}.global_scale is missing; a {fmt} tensor has one")
        dtype = metadata[f"{name}.dtype"]
        if dtype not in ops.DTYPES:
            raise ValueError(f"{name}.dtype is {dtype!r}; accepted: {', '.join(ops.DTYPES)}")
        lengths = metadata[f"{name}.shape"].split(",")
        if not all(n.isdecimal() for n in lengths):
            raise ValueError(f"{name}.shape is {','.join(lengths)!r}; accepted: lengths such as '64,128'")
        shape = torch.Size(int(n) for n in lengths)
        k, rows = fmt.padded(shape[-1]), shape[:-1]
        accepted = {
            "codes": (fmt.codes_dtype, [(*rows, k // fmt.codes_per_byte)]),
            "scales": (fmt.scale_dtype, [(*rows, k // fmt.block)]),
            "global_scale": (torch.float32, [(), (*rows, 1), (*rows[:1], 1, 1)] if fmt.has_global_scale else []),
        }
        made = {key: tensors.get(f"{name}.{key}") for key in accepted}
        for key, (t_dtype, shapes) in accepted.items():
            t = made[key]
            if t is not None and (t.dtype != t_dtype or tuple(t.shape) not in shapes):
                wanted = f"{t_dtype} {' or '.join(map(str, shapes))}" if shapes else f"none, for {fmt}"
                raise ValueError(f"{name}.{key} is {t.dtype} {tuple(t.shape)}; accepted: {wanted}")
        return cls(**made, format=fmt, shape=shape, dtype=ops.DTYPES[dtype])

    def __repr__(self) -> str:
        size = f"shape={tuple(self.shape)}, {self.bits_per_element:.2f} bits an element"
        return f"QTensor({self.format}, {size}, device={self.device})"
