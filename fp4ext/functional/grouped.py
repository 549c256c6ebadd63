"""grouped_quantize and grouped_gemm: all experts of a mixture in one call.

The rows of x [T, K] are tokens, sorted by expert: rows offsets[e-1] … offsets[e] are expert e's, and rows past the last
offset are unassigned. w [E, N, K] has one matrix per expert. The three GEMMs of a layer are

    fprop   y[rows_e]  = x[rows_e]  · w[e]ᵀ                 contraction K
    dgrad   dx[rows_e] = dy[rows_e] · w[e]                  contraction N: the same form, with wᵀ [E, K, N]
    wgrad   dw[e]      = dy[rows_e]ᵀ · x[rows_e]            contraction over the expert's tokens

and each of them equals, byte for byte, `gemm` of `quantize` of that expert's matrices alone: each expert has its own
outer scales, padding to whole blocks and length of the RHT, independently of the other experts (docs/numerics.md,
section 9, "Experts").
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ..errors import Refused
from ..policy.formats import Format
from ..policy.spec import Spec, as_spec
from . import cublas, ops
from .gemms import check_choices, operand
from .qtensor import BlockScaled, QTensor, Ragged
from .quantization import OnDevice, check_device, check_input, check_place, rng_state, wrap


@overload
def grouped_quantize(
    x: Tensor | QTensor,
    spec: Spec | Format | str,
    offsets: None = None,
    *,
    axis: int = -1,
    rng: Tensor | int | None = None,
    role: str = "x",
) -> QTensor: ...


@overload
def grouped_quantize(
    x: Tensor | QTensor,
    spec: Spec | Format | str,
    offsets: Tensor | None = None,
    *,
    axis: Literal[-1] = -1,
    rng: Tensor | int | None = None,
    role: str = "x",
) -> QTensor: ...


@overload
def grouped_quantize(
    x: Tensor | QTensor,
    spec: Spec | Format | str,
    offsets: Tensor | None = None,
    *,
    axis: int = -1,
    rng: Tensor | int | None = None,
    role: str = "x",
) -> QTensor | Ragged: ...


def grouped_quantize(
    x: Tensor | QTensor,
    spec: Spec | Format | str,
    offsets: Tensor | None = None,
    *,
    axis: int = -1,
    rng: Tensor | int | None = None,
    role: str = "x",
) -> QTensor | Ragged:
    """quantize each expert's matrix alone, all in one call.

    Args:
        x: fp32, bf16 or fp16: [T, K], rows sorted by expert; or [E, N, K] without offsets. A QTensor is dequantized and
            quantized again.
        spec: a Spec, its key or a Format. Each expert has outer scales of its own: outer="tensor" (or "expert") is one
            per expert.
        offsets: int32 [E], the ends of the experts' rows; an expert whose end equals the one before has no rows. The
            unassigned rows past the last end are not read, even if they are NaN: their codes and scales are zero.
        axis: -1; or -2 to quantize x.mT.
        rng, role: see quantize. The random bits of an element depend on its position along the contraction and on its
            row in x; with axis=-2, on its row in the stack of the experts' transposes.

    Returns:
        A QTensor, with one global scale per row for [T, K] and one per expert for [E, N, K]; for [T, K] with axis=-2 a
        Ragged.

    Raises:
        ValueError, TypeError: as quantize. RuntimeError: as quantize; offsets that decrease or exceed the rows of x.

    Source: docs/numerics.md, section 9, "Experts".
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
    shape = torch.Size((x.shape[1], x.shape[0]))
    return Ragged(codes, scales, outer if spec.fmt.has_global_scale else None, spec.fmt, shape, offsets, x.dtype)


def grouped_gemm(
    x: QTensor | Ragged | Tensor,
    w: QTensor | Ragged | Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    accumulate: str = "invariant",
    backend: str = "auto",
) -> Tensor:
    """One product per expert, all in one call: over rows, or over tokens.

    Args:
        x, w: over rows, [T, K] and [E, N, K]: y[rows_e] = x[rows_e]·w[e]ᵀ. Over tokens, [M, T] and [N, T]:
            y[e] = x[:, rows_e]·w[:, rows_e]ᵀ. QTensors of any format (over tokens, Ragged), or plain fp32, bf16 or fp16
            tensors.
        offsets: int32 [E], the ends of the experts' rows; for a Ragged those that it was quantized with.
        out_dtype, accumulate, backend: see gemm. "fast" does not accept experts; cublas.GROUPED_TAKES says which
            "cublas" accepts.

    Returns:
        [T, N], where unassigned rows (those past the last offset) are zero; or [E, M, N], where an expert without
        tokens has zeros. No gradient flows through it: fp4ext.grouped_linear has a backward.

    Raises:
        ValueError: sizes or devices that differ, an unknown accumulate or backend. TypeError: an operand or dtype that
        is not accepted. RuntimeError: offsets that decrease or exceed the rows; a backend that is not available.

    Source: docs/numerics.md, section 9, "Experts".
    """
    operands = operand("x", x, BlockScaled), operand("w", w, BlockScaled)
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
        raise Refused(f"w has {w.shape[0]} experts and offsets {offsets.shape[0]}; accepted: one end per expert")
    if x.shape[-1] != w.shape[-1]:
        raise Refused(f"x {tuple(x.shape)} and w {tuple(w.shape)} differ in their last axis, the contraction")
    if backend == "cublas":
        return cublas.grouped_gemm(x, w, offsets, out_dtype)
    return ops.grouped_gemm(*operands, offsets, ops.dtype_name(out_dtype), accumulate, backend)


def expert_ends(chosen: Tensor, experts: int) -> Tensor:
    """The offsets of grouped ops, int32 [experts], from the expert of each row, int64 [T] and sorted.

    A search, not a count: its shape does not depend on the values, so torch.compile needs no guard on them.
    """
    return torch.searchsorted(chosen, torch.arange(experts, device=chosen.device), right=True, out_int32=True)


def check_offsets(offsets: object, x: OnDevice) -> None:
    """Raises TypeError or ValueError unless offsets is an int32 [E] on the device of x."""
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int32 or offsets.dim() != 1:
        what = f"{offsets.dtype} {tuple(offsets.shape)}" if isinstance(offsets, Tensor) else type(offsets).__name__
        raise TypeError(f"offsets is {what}; accepted: int32 [E], the ends of the experts' rows")
    check_device("offsets", offsets, x)
