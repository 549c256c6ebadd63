"""Many experts at once: grouped_quantize and grouped_gemm.

The tokens of a mixture of experts, sorted by expert: rows offsets[e-1] … offsets[e] of x [T, K] are expert e's, rows
past the last offset nobody's. With w [E, N, K] one matrix an expert, the three GEMMs of a layer are

    fprop   y[rows_e]  = x[rows_e]  · w[e]ᵀ                 contraction K
    dgrad   dx[rows_e] = dy[rows_e] · w[e]                  contraction N: the same form, with wᵀ [E, K, N]
    wgrad   dw[e]      = dy[rows_e]ᵀ · x[rows_e]            contraction over the expert's tokens

and each of them equals, byte for byte, `gemm` of what `quantize` makes of that expert's matrices alone: an expert has
its own outer scale, its own padding to whole blocks and its own length of the RHT, whatever stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import Refused
from ..policy.formats import Format
from ..policy.spec import Spec, as_spec
from . import cublas, ops
from .gemms import check_choices, operand
from .qtensor import QTensor
from .quantization import check_device, check_input, check_place, rng_state, wrap


@dataclass(frozen=True, eq=False)
class Ragged:
    """A quantized x.mT [K, T] for wgrad: contracted over tokens, each expert's padded to whole blocks on their own.

    Attributes:
        codes, scales: as in QTensor, [K, columns]: first the tokens of expert 0 with their padding, then those of
            expert 1; zeros at the end.
        global_scale: fp32 [E, 1, 1], or [E, K, 1] with outer="row"; None where the format has none.
        format: the Format.
        shape: (K, T).
        offsets: the ends of the experts' rows.
        dtype: what dequantize gives by default.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    format: Format
    shape: torch.Size
    offsets: Tensor
    dtype: torch.dtype = torch.float32

    def expert(self, e: int) -> QTensor:
        """Expert e's [K, T_e], as quantize(x[rows_e], axis=-2) makes it."""
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
        """[K, T], zeros for tokens that are nobody's. After an RHT the rotated values, less those in the padding."""
        parts = [self.expert(e).dequantize(dtype) for e in range(len(self.offsets))]
        rest = self.shape[1] - sum(p.shape[1] for p in parts)
        return torch.cat([*parts, parts[0].new_zeros(self.shape[0], rest)], dim=1)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory: codes, block scales, outer scales and offsets."""
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by field."""
        made_of = {"codes": self.codes, "scales": self.scales, "global_scale": self.global_scale}
        return {name: t for name, t in {**made_of, "offsets": self.offsets}.items() if t is not None}


def grouped_quantize(
    x: Tensor | QTensor,
    spec: Spec | Format | str,
    offsets: Tensor | None = None,
    *,
    axis: int = -1,
    rng: Tensor | int | None = None,
    role: str = "x",
) -> QTensor | Ragged:
    """quantize, each expert's matrix alone, all in one call.

    Args:
        x: [T, K], rows sorted by expert; or [E, N, K] without offsets. A QTensor is dequantized and quantized anew.
        spec: a Spec, its key or a Format. Each expert has outer scales of its own: outer="tensor" (or "expert") is one
            per expert.
        offsets: int32 [E], the ends of the experts' rows; ends that are equal are an expert without rows. Rows past the
            last one are not read, be they NaN: their codes and scales are zero.
        axis: -1; or -2 for x.mT.
        rng, role: see quantize. An element's random bits hang on its row in x, or with axis=-2 on its row in the stack
            of the experts' transposes, and on its place along the contraction.

    Returns:
        A QTensor, whose global scale is one a row for [T, K] and one an expert for [E, N, K]; for [T, K] with axis=-2 a
        Ragged.

    Raises:
        ValueError, TypeError: as quantize. RuntimeError: likewise; offsets that decrease or pass the rows.

    Source: docs/numerics.md, 9.
    """
    if not isinstance(x, QTensor):
        check_input("x", x)
    spec = as_spec(spec)
    check_place(axis, role)
    if offsets is not None:
        check_offsets(offsets, x)
    if isinstance(x, QTensor):
        rng = rng_state(rng, x.codes, spec)
        out = ops.grouped_requantize(*x.stored(), offsets, spec.key, axis, rng, ops.ROLES[role])
    else:
        out = ops.grouped_quantize(x.detach(), offsets, spec.key, axis, rng_state(rng, x, spec), ops.ROLES[role])
    if offsets is None or axis == -1:
        return wrap(x, spec, axis, *out)
    codes, scales, outer = out
    shape, outer = torch.Size((x.shape[1], x.shape[0])), outer if spec.fmt.has_global_scale else None
    return Ragged(codes, scales, outer, spec.fmt, shape, offsets, x.dtype)


def grouped_gemm(
    x: QTensor | Ragged | Tensor,
    w: QTensor | Ragged | Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: str = "invariant",
    backend: str = "auto",
) -> Tensor:
    """One product an expert, in one call: over rows, or over tokens.

    Args:
        x, w: over rows, [T, K] and [E, N, K]: y[rows_e] = x[rows_e]·w[e]ᵀ. Over tokens, [M, T] and [N, T]:
            y[e] = x[:, rows_e]·w[:, rows_e]ᵀ. QTensors of any format (over tokens, Ragged), or plain fp32, bf16 or fp16
            tensors.
        offsets: int32 [E], the ends of the experts' rows; for a Ragged those that it was made with.
        out_dtype, accumulate, backend: see gemm. "fast" takes no experts, "cublas" those of cublas.GROUPED_TAKES.

    Returns:
        [T, N], where rows past the last offset are zero, whatever x holds there; or [E, M, N], where an expert without
        tokens has zeros. No gradient flows through it: fp4ext.Experts has a backward.

    Raises:
        ValueError: sizes or devices that differ, an unknown choice. TypeError: an operand or dtype that is refused.
        RuntimeError: offsets that decrease or pass the rows.

    Source: docs/numerics.md, 9.
    """
    operands = *_grouped_operand("x", x), *_grouped_operand("w", w)
    check_choices(out_dtype, accumulate, backend, x.device)
    if backend == "fast":
        raise Refused("backend 'fast' takes dense products; accepted for experts: auto, emulated, native, cublas")
    check_device("w", w, x)
    check_offsets(offsets, x)
    if len(x.shape) != 2 or len(w.shape) not in (2, 3):
        raise Refused(
            f"x has shape {tuple(x.shape)} and w {tuple(w.shape)}; accepted: [T, K] and [E, N, K], or [M, T] and [N, T]"
        )
    wanted, form = (QTensor, "[E, N, K]") if len(w.shape) == 3 else (Ragged, "[N, T]")
    for name, t in (("x", x), ("w", w)):
        if not isinstance(t, (Tensor, wanted)):
            raise TypeError(f"{name} is {type(t).__name__} beside w {form}; accepted: {wanted.__name__}, torch.Tensor")
    if len(w.shape) == 3 and w.shape[0] != offsets.shape[0]:
        raise Refused(f"w has {w.shape[0]} experts and offsets {offsets.shape[0]}; accepted: one end an expert")
    if x.shape[-1] != w.shape[-1]:
        raise Refused(f"x {tuple(x.shape)} and w {tuple(w.shape)} differ in their last axis, the contraction")
    if backend == "cublas":
        return cublas.grouped_gemm(x, w, offsets, out_dtype)
    return ops.grouped_gemm(*operands, offsets, ops.dtype_name(out_dtype), accumulate, backend)


def expert_ends(chosen: Tensor, experts: int) -> Tensor:
    """The offsets that grouped ops take, int32 [experts], of each row's expert [T], which are sorted.

    A search instead of a count: its shape does not depend on the values, so torch.compile needs no guard on them.
    """
    return torch.searchsorted(chosen, torch.arange(experts, device=chosen.device), right=True, out_int32=True)


def check_offsets(offsets: Tensor, x: QTensor | Ragged | Tensor) -> None:
    """Refuse what is no int32 [E] on the device of x."""
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int32 or offsets.dim() != 1:
        what = f"{offsets.dtype} {tuple(offsets.shape)}" if isinstance(offsets, Tensor) else type(offsets).__name__
        raise TypeError(f"offsets is {what}; accepted: int32 [E], the ends of the experts' rows")
    check_device("offsets", offsets, x)


def _grouped_operand(name: str, t: QTensor | Ragged | Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    if isinstance(t, Ragged):
        return t.codes, t.scales, t.global_scale, t.format.name
    return operand(name, t)
