"""QTensor: a quantized matrix, as data. Ragged: one whose contraction is cut between experts.

They are frozen, and no torch function takes them, so nothing dequantizes them implicitly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import Refused
from ..policy import formats
from ..policy.formats import Format
from . import ops
from .fakes import DTYPES, Quantized


@dataclass(frozen=True, eq=False)
class BlockScaled:
    """Codes, block scales and outer scale of a tensor: the fields of QTensor and Ragged, which document them."""

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    format: Format
    shape: torch.Size

    @property
    def device(self) -> torch.device:
        """The device that holds the codes."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in memory."""
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, by the names of the fields."""
        made_of = {"codes": self.codes, "scales": self.scales, "global_scale": self.global_scale}
        return {name: t for name, t in made_of.items() if t is not None}

    def parts(self) -> Quantized:
        """Codes, block scales and outer scale; the outer scale is an empty tensor where the format has none."""
        outer = self.codes.new_empty(0, dtype=torch.float32) if self.global_scale is None else self.global_scale
        return self.codes, self.scales, outer


@dataclass(frozen=True, eq=False)
class QTensor(BlockScaled):
    """A tensor of logical shape `shape` [.., rows, K] in a block format, contraction (K) last.

    Attributes:
        codes: uint8 [.., rows, ⌈K⌉/2] (E2M1, two per byte) or float8 [.., rows, ⌈K⌉]; ⌈K⌉ is K rounded up to whole
            blocks.
        scales: block scales, float8_e4m3fn (NVFP4) or float8_e8m0fnu (MX), [.., rows, ⌈K⌉/block], in linear layout.
        global_scale: fp32 decode multiplier (the outer scale), broadcastable to [.., rows, 1]; None where the format
            has none.
        format: the Format.
        shape: the logical shape.
        dtype: the default dtype of dequantize: that of the tensor that was quantized.

    A QTensor can be copied, pickled, and read by torch.load with weights_only=True.

    Raises:
        TypeError: a field of another type. ValueError: tensors whose dtypes or shapes do not fit together.

    Source: docs/numerics.md, sections 1-3.
    """

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # compiled code repeats what eager code built, and needs no guards for it
            _check(self)

    def __reduce__(self) -> tuple[Callable[..., QTensor], tuple[Any, ...]]:
        # As bytes: torch.load(weights_only=True) reads no 8-bit floats. It calls `_rebuilt`, which is listed below.
        codes, scales = self.codes.view(torch.uint8), self.scales.view(torch.uint8)
        return _rebuilt, (codes, scales, self.global_scale, self.format.name, tuple(self.shape), self.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """x̂ = element · fl(block scale · global scale), [.., rows, K], rounded once to dtype.

        After an RHT these are the rotated values.

        Args:
            dtype: float32, bfloat16 or float16; None: self.dtype. Raises TypeError for another.
        """
        return ops.dequantize(*self.stored(), ops.dtype_name(dtype or self.dtype))

    def stored(self) -> tuple[Tensor, Tensor, Tensor, str, int]:
        """Codes, scales, outer scale (empty where there is none), format and K, as ops take them."""
        return *self.parts(), self.format.name, self.shape[-1]

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element, with all scales; nan for an empty tensor."""
        n = self.shape.numel()
        return 8 * self.nbytes / n if n else float("nan")

    def to(self, device: torch.device | str) -> QTensor:
        """A copy on another device. Raises TypeError or RuntimeError for an argument that is no device."""
        device = torch.device(device)
        moved: dict[str, Any] = {name: t.to(device) for name, t in self.tensors().items()}
        return replace(self, **moved)

    def to_safetensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and the metadata that safetensors.torch.save_file takes; all keys start with `name`."""
        tensors = {f"{name}.{key}": t.contiguous() for key, t in self.tensors().items()}
        shape = ",".join(map(str, self.shape))
        meta = {"format": self.format.name, "shape": shape, "dtype": ops.dtype_name(self.dtype)}
        return tensors, {f"{name}.{key}": value for key, value in meta.items()}

    @classmethod
    def from_safetensors(cls, name: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> QTensor:
        """The inverse of to_safetensors. Raises KeyError for a missing key, ValueError for parts that do not fit."""
        missing = [key for key in (f"{name}.format", f"{name}.shape", f"{name}.dtype") if key not in metadata]
        missing += [key for key in (f"{name}.codes", f"{name}.scales") if key not in tensors]
        if missing:
            raise KeyError(f"no QTensor {name!r} here: missing {', '.join(missing)}")
        fmt = formats.get(metadata[f"{name}.format"])
        if fmt.has_global_scale and f"{name}.global_scale" not in tensors:
            raise KeyError(f"{name}.global_scale is missing; a {fmt} tensor has one")
        dtype = metadata[f"{name}.dtype"]
        if dtype not in DTYPES:
            raise Refused(f"{name}.dtype is {dtype!r}; accepted: {', '.join(DTYPES)}")
        lengths = metadata[f"{name}.shape"].split(",")
        if not all(n.isdecimal() for n in lengths):
            raise Refused(f"{name}.shape is {','.join(lengths)!r}; accepted: lengths such as '64,128'")
        shape = torch.Size(int(n) for n in lengths)
        codes, scales, outer = tensors[f"{name}.codes"], tensors[f"{name}.scales"], tensors.get(f"{name}.global_scale")
        try:
            return cls(codes, scales, outer, fmt, shape, DTYPES[dtype])
        except ValueError as error:
            raise Refused(f"{name}.{error}") from None

    def __repr__(self) -> str:
        size = f"shape={tuple(self.shape)}, {self.bits_per_element:.2f} bits per element"
        return f"QTensor({self.format}, {size}, device={self.device})"


@dataclass(frozen=True, eq=False)
class Ragged(BlockScaled):
    """A quantized x.mT [K, T] for wgrad, contracted over each expert's tokens, which are padded to whole blocks.

    Attributes:
        codes, scales: as in QTensor, [K, columns]: the tokens of expert 0 with their padding, then those of expert 1,
            and so on; zeros at the end.
        global_scale: fp32 [E, 1, 1], or [E, K, 1] with outer="row"; None where the format has none.
        format: the Format.
        shape: (K, T).
        offsets: int32 [E], the ends of the experts' rows in x.
        dtype: the default dtype of dequantize: that of x.

    Source: docs/numerics.md, section 9, "Experts".
    """

    offsets: Tensor
    dtype: torch.dtype = torch.float32

    def expert(self, e: int) -> QTensor:
        """Expert e's [K, T_e], with the bytes of quantize(x[rows_e], axis=-2)."""
        ends = [0, *self.offsets.tolist()]
        start = sum(self.format.padded(b - a) for a, b in zip(ends[:e], ends[1 : e + 1], strict=True))
        tokens = ends[e + 1] - ends[e]
        stop = start + self.format.padded(tokens)
        outer = self.global_scale
        if outer is not None:
            outer = outer[e] if outer.shape[1] > 1 else outer[e, 0, 0]
        per_byte, block = self.format.codes_per_byte, self.format.block
        codes = self.codes[:, start // per_byte : stop // per_byte]
        scales = self.scales[:, start // block : stop // block]
        return QTensor(codes, scales, outer, self.format, torch.Size((self.shape[0], tokens)), self.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """x̂.mT [K, T], with zeros for unassigned rows of x. After an RHT the rotated values, without the padding."""
        parts = [self.expert(e).dequantize(dtype) for e in range(len(self.offsets))]
        rest = self.shape[1] - sum(p.shape[1] for p in parts)
        return torch.cat([*parts, parts[0].new_zeros(self.shape[0], rest)], dim=1)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, by the names of the fields, the offsets included."""
        return {**super().tensors(), "offsets": self.offsets}


def _check(q: QTensor) -> None:
    """Raises TypeError or ValueError unless the parts of a QTensor fit together."""
    if not isinstance(q.format, Format):
        raise TypeError(f"format is {q.format!r}; accepted: a Format, see formats.get")
    if q.dtype not in DTYPES.values():
        raise Refused(f"dtype is {q.dtype}; accepted: {', '.join(map(str, DTYPES.values()))}")
    *rows, k = q.shape or (0,)
    k = q.format.padded(k)
    codes, scales = (*rows, k // q.format.codes_per_byte), (*rows, k // q.format.block)
    _check_part("codes", q.codes, q.format.codes_dtype, [codes])
    _check_part("scales", q.scales, q.format.scale_dtype, [scales])
    if q.format.has_global_scale:
        whole: list[tuple[int, ...]] = [(), (*rows, 1), (*rows[:1], 1, 1)]
        _check_part("global_scale", q.global_scale, torch.float32, whole if len(rows) > 1 else whole[:2], rows)
    elif q.global_scale is not None:
        raise Refused(f"global_scale is {_of(q.global_scale)}; accepted: none, for {q.format}")


def _check_part(
    name: str, part: object, dtype: torch.dtype, shapes: list[tuple[int, ...]], rows: list[int] | None = None
) -> None:
    """Raises unless a part is a Tensor of this dtype and shape, or, given rows, broadcastable to [*rows, 1]."""
    accepted = f"{dtype} {' or '.join(map(str, shapes))}"
    if part is not None and not isinstance(part, Tensor):
        raise TypeError(f"{name} is {type(part).__name__}; accepted: a Tensor, {accepted}")
    if part is None or part.dtype != dtype:
        fits = False
    elif rows is None:
        fits = tuple(part.shape) in shapes
    else:
        wanted = (*rows, 1)
        fits = part.dim() <= len(wanted) and all(
            n in (1, most) for n, most in zip(part.shape[::-1], wanted[::-1], strict=False)
        )
    if not fits:
        raise Refused(f"{name} is {_of(part)}; accepted: {accepted}")


def _of(part: object) -> str:
    return f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else repr(part)


def _rebuilt(
    codes: Tensor, scales: Tensor, outer: Tensor | None, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> QTensor:
    """The QTensor that QTensor.__reduce__ took apart."""
    fmt = formats.get(name)
    return QTensor(codes.view(fmt.codes_dtype), scales.view(fmt.scale_dtype), outer, fmt, torch.Size(shape), dtype)


torch.serialization.add_safe_globals([_rebuilt])
