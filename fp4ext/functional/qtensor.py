"""QTensor: a quantized matrix, as data.

Frozen and inert: no torch function takes it, so nothing dequantizes it behind your back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import Refused
from ..policy import formats
from ..policy.formats import Format
from . import ops


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

    It can be copied, pickled, and read by torch.load with weights_only=True.

    Raises:
        TypeError: a part of another type. ValueError: parts whose dtypes or shapes do not fit together.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    format: Format
    shape: torch.Size
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        if not torch.compiler.is_compiling():  # compiled code builds what eager code built, and needs no guards for it
            _check(self)

    def __reduce__(self):
        # As bytes: torch.load(weights_only=True) reads no 8-bit floats. It calls `_rebuilt`, which is listed below.
        codes, scales = self.codes.view(torch.uint8), self.scales.view(torch.uint8)
        return _rebuilt, (codes, scales, self.global_scale, self.format.name, tuple(self.shape), self.dtype)

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
            raise Refused(f"{name}.dtype is {dtype!r}; accepted: {', '.join(ops.DTYPES)}")
        lengths = metadata[f"{name}.shape"].split(",")
        if not all(n.isdecimal() for n in lengths):
            raise Refused(f"{name}.shape is {','.join(lengths)!r}; accepted: lengths such as '64,128'")
        shape = torch.Size(int(n) for n in lengths)
        made = {key: tensors.get(f"{name}.{key}") for key in ("codes", "scales", "global_scale")}
        try:
            return cls(**made, format=fmt, shape=shape, dtype=ops.DTYPES[dtype])
        except ValueError as error:
            raise Refused(f"{name}.{error}") from None

    def __repr__(self) -> str:
        size = f"shape={tuple(self.shape)}, {self.bits_per_element:.2f} bits an element"
        return f"QTensor({self.format}, {size}, device={self.device})"


def _check(q: QTensor) -> None:
    """Raises TypeError or ValueError unless the parts of a QTensor fit together."""
    if not isinstance(q.format, Format):
        raise TypeError(f"format is {q.format!r}; accepted: a Format, see formats.get")
    if q.dtype not in ops.DTYPES.values():
        raise Refused(f"dtype is {q.dtype}; accepted: {', '.join(map(str, ops.DTYPES.values()))}")
    *rows, k = q.shape or (0,)
    k = q.format.padded(k)
    codes, scales = (*rows, k // q.format.codes_per_byte), (*rows, k // q.format.block)
    _check_part("codes", q.codes, q.format.codes_dtype, [codes])
    _check_part("scales", q.scales, q.format.scale_dtype, [scales])
    if q.format.has_global_scale:
        whole = [(), (*rows, 1), (*rows[:1], 1, 1)]
        _check_part("global_scale", q.global_scale, torch.float32, whole if len(rows) > 1 else whole[:2], rows)
    elif q.global_scale is not None:
        raise Refused(f"global_scale is {_of(q.global_scale)}; accepted: none, for {q.format}")


def _check_part(name: str, part, dtype: torch.dtype, shapes: list[tuple[int, ...]], rows: list[int] | None = None):
    """Raises unless a part is a Tensor of this dtype and shape, or, given rows, broadcastable to [*rows, 1]."""
    accepted = f"{dtype} {' or '.join(map(str, shapes))}"
    if part is not None and not isinstance(part, Tensor):
        raise TypeError(f"{name} is {type(part).__name__}; accepted: a Tensor, {accepted}")
    fits = part is not None and part.dtype == dtype
    if fits and rows is None:
        fits = tuple(part.shape) in shapes
    elif fits:
        wanted = (*rows, 1)
        fits = part.dim() <= len(wanted) and all(
            n in (1, most) for n, most in zip(part.shape[::-1], wanted[::-1], strict=False)
        )
    if not fits:
        raise Refused(f"{name} is {_of(part)}; accepted: {accepted}")


def _of(part) -> str:
    return f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else repr(part)


def _rebuilt(codes: Tensor, scales: Tensor, outer: Tensor | None, fmt: str, shape: tuple[int, ...], dtype) -> QTensor:
    """What QTensor.__reduce__ took apart."""
    fmt = formats.get(fmt)
    return QTensor(codes.view(fmt.codes_dtype), scales.view(fmt.scale_dtype), outer, fmt, torch.Size(shape), dtype)


torch.serialization.add_safe_globals([_rebuilt])
