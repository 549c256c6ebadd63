"""QTensor: a quantized matrix, as data. Frozen and inert: no torch function takes it, so nothing dequantizes it behind your back."""

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
        """x̂ = element · fl(block scale · global scale), [.., rows, K], rounded once to dtype (default: self.dtype)."""
        outer = self.codes.new_empty(0, dtype=torch.float32) if self.global_scale is None else self.global_scale
        return ops.dequantize(
            self.codes, self.scales, outer, self.format.name, self.shape[-1], ops.dtype_name(dtype or self.dtype)
        )

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
        """The same on another device."""
        return replace(self, **{name: t.to(device) for name, t in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by field."""
        made_of = {"codes": self.codes, "scales": self.scales, "global_scale": self.global_scale}
        return {name: t for name, t in made_of.items() if t is not None}

    def to_safetensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What safetensors.torch.save_file takes: tensors and metadata, their keys starting with `name`."""
        tensors = {f"{name}.{key}": t.contiguous() for key, t in self.tensors().items()}
        meta = {"format": self.format.name, "shape": ",".join(map(str, self.shape)), "dtype": str(self.dtype).removeprefix("torch.")}
        return tensors, {f"{name}.{key}": value for key, value in meta.items()}

    @classmethod
    def from_safetensors(cls, name: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> QTensor:
        """The inverse of to_safetensors. Raises KeyError (what is missing) or ValueError (what does not fit)."""
        wanted = [f"{name}.{key}" for key in ("format", "shape", "dtype")]
        missing = [k for k in wanted if k not in metadata] + [f"{name}.{k}" for k in ("codes", "scales") if f"{name}.{k}" not in tensors]
        if missing:
            raise KeyError(f"no QTensor {name!r} here: missing {', '.join(missing)}")
        fmt = formats.get(metadata[f"{name}.format"])
        if fmt.has_global_scale and f"{name}.global_scale" not in tensors:
            raise KeyError(f"{name}.global_scale is missing; a {fmt} tensor has one")
        shape = torch.Size(int(n) for n in metadata[f"{name}.shape"].split(",") if n)
        k = fmt.padded(shape[-1])
        for key, size, dtype in (
            ("codes", k // fmt.codes_per_byte, fmt.codes_dtype),
            ("scales", k // fmt.block, fmt.scale_dtype),
        ):
            t = tensors[f"{name}.{key}"]
            if t.dtype != dtype or t.shape != (*shape[:-1], size):
                raise ValueError(f"{name}.{key} is {t.dtype} {tuple(t.shape)}; accepted: {dtype} {(*shape[:-1], size)}")
        made = {key: tensors.get(f"{name}.{key}") for key in ("codes", "scales", "global_scale")}
        return cls(**made, format=fmt, shape=shape, dtype=getattr(torch, metadata[f"{name}.dtype"]))

    def __repr__(self) -> str:
        return f"QTensor({self.format}, shape={tuple(self.shape)}, {self.bits_per_element:.2f} bits an element, device={self.device})"


