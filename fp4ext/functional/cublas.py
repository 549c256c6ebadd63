"""Backend "cublas": products by torch's scaled_mm, which passes codes and swizzled scales to cuBLASLt.

cuBLASLt chooses its order of summation by shape, so rows are not invariant. Where there is a bias, or a tensor to add
to, the product is fp32 and is rounded once, after the addition.

Experts are multiplied by torch's scaled_grouped_mm, over rows: y[rows_e] = x[rows_e]·w[e]ᵀ. It takes each expert's
scales padded to 128 rows in the tensor cores' layout. Both it and ops.swizzle read the offsets on the device, so
neither synchronizes with the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..errors import Refused
from . import ops
from .qtensor import BlockScaled, QTensor

if TYPE_CHECKING:  # old torch releases have neither
    from torch.nn.functional import ScalingType, SwizzleType

LEAST = (10, 0)  # the lowest compute capability
GROUPED_MAJOR = 10  # the major compute capability for which torch has scaled_grouped_mm
MOST_EXPERTS = 1024  # torch counts them in one block of threads
TAKES = (
    "backend 'cublas' takes NVFP4·NVFP4 with K a multiple of 32, or MXFP8·MXFP8; N a multiple of 16; "
    "global scales of one value (outer='tensor' or 'pow2')"
)
GROUPED_TAKES = (
    f"backend 'cublas' takes experts over rows, at most {MOST_EXPERTS}, into bfloat16: NVFP4·NVFP4 with K a multiple "
    "of 32, or MXFP8·MXFP8; N a multiple of 16; one global scale per expert for w"
)


def status(device: int) -> str:
    """One line for fp4ext.backends(): "available: …" or "built, but …"."""
    major, minor = torch.cuda.get_device_capability(device)
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"built, but torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if (major, minor) < LEAST:
        return f"built, but this device is sm_{major}{minor}, and it needs sm_{LEAST[0]}{LEAST[1]}"
    experts = "and scaled_grouped_mm" if grouped_status(device) is None else "dense products alone"
    how = "with accumulate='fast'; not row-invariant, global scales multiplied in fp32"
    return f"available: torch's scaled_mm, {experts}, {how}"


def grouped_status(device: int) -> str | None:
    """Why torch does not multiply experts on that device, or None."""
    major, minor = torch.cuda.get_device_capability(device)
    if not hasattr(torch.nn.functional, "scaled_grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_grouped_mm"
    if major != GROUPED_MAJOR:
        return f"this device is sm_{major}{minor}, and torch's scaled_grouped_mm needs sm_{GROUPED_MAJOR}x"
    return None


def gemm(
    x: QTensor | Tensor, w: QTensor | Tensor, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """x̂·ŵᵀ + bias, [.., M, N], or that added to `out`. The arguments are those of fp4ext.gemm.

    Raises:
        ValueError: operands other than TAKES says. RuntimeError: the device or torch does not support it.
    """
    x, w = takes(x, w)
    line = status(x.device.index)
    if not line.startswith("available"):
        raise RuntimeError(f"backend 'cublas' is not available: {line}")
    shape = (*x.shape[:-1], w.shape[0])
    if out is not None and (out.dtype != torch.float32 or out.shape != shape or not out.is_contiguous()):
        raise Refused(f"out is {out.dtype} {tuple(out.shape)}; accepted: a contiguous float32 {shape}")
    recipe, swizzled = _recipe(x)
    (a, scale_a), (b, scale_b) = _matrix(x), _matrix(w)
    y = torch.nn.functional.scaled_mm(
        a,
        b.t(),
        scale_a,
        recipe,
        scale_b,
        recipe,
        swizzle_a=swizzled,
        swizzle_b=swizzled,
        output_dtype=out_dtype if bias is None and out is None else torch.float32,
    ).view(shape)
    if bias is not None:
        y = y + bias.float()
    if out is None:
        return y.to(out_dtype)
    out.detach().add_(y)
    return out


def takes(x: QTensor | Tensor, w: QTensor | Tensor) -> tuple[QTensor, QTensor]:
    """x and w themselves. Raises ValueError for operands that scaled_mm does not take on any device."""
    x, w = _of_one_format(x, w, TAKES)
    k = x.format.padded(x.shape[-1])
    if k % 32 or w.shape[0] % 16:
        raise Refused(f"K is {k} in whole blocks and N {w.shape[0]}; {TAKES}")
    for name, t in (("x", x), ("w", w)):
        if t.global_scale is not None and t.global_scale.numel() != 1:
            raise Refused(f"{name} has global scales {tuple(t.global_scale.shape)}; {TAKES}")
    return x, w


def grouped_gemm(
    x: BlockScaled | Tensor, w: BlockScaled | Tensor, offsets: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """y[rows_e] = x̂[rows_e]·ŵ[e]ᵀ, [T, N], unassigned rows being zero. The arguments are those of fp4ext.grouped_gemm.

    torch's kernel takes one global scale per expert, and gets that of the expert's first row of x. Where its other rows
    have other scales (outer="row"), y is rounded to bfloat16 before it is multiplied by their ratio, and again after.

    Raises:
        ValueError: operands other than GROUPED_TAKES says. RuntimeError: the device or torch does not support it.
    """
    x, w = grouped_takes(x, w, out_dtype)
    why = grouped_status(x.device.index)
    if why is not None:
        raise RuntimeError(f"backend 'cublas' is not available for experts: {why}")
    (rows, _), (experts, n, _) = x.shape, w.shape
    if rows == 0 or n == 0:
        return torch.zeros(rows, n, dtype=out_dtype, device=x.device)
    # Invalid offsets are clamped, as in fp4ext's kernels; torch's kernel would abort on them.
    ends = offsets.clamp(0, rows).cummax(0).values
    of_row = torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=x.device), right=True)
    scales_x, scales_w = [ops.swizzle(x.scales, ends)], [ops.swizzle(w.scales)]
    factor = None
    if x.global_scale is not None and w.global_scale is not None:
        of_expert, factor = _global_scales(x.global_scale, ends, of_row)
        scales_x.append(of_expert)
        scales_w.append(w.global_scale.reshape(-1).expand(experts).contiguous())
    recipe, swizzled = _recipe(x)
    y: Tensor = torch.nn.functional.scaled_grouped_mm(  # type: ignore[attr-defined]  # newer torch releases have it
        _codes(x),
        _codes(w).transpose(-2, -1),
        scales_x,
        recipe,
        scales_w,
        recipe,
        swizzle_a=swizzled,
        swizzle_b=swizzled,
        offs=ends,
        output_dtype=out_dtype,
    )
    if factor is not None:
        y = (y.float() * factor).to(out_dtype)
    return y.where((of_row < experts).unsqueeze(1), 0)  # torch leaves unassigned rows uninitialized


def grouped_takes(
    x: BlockScaled | Tensor, w: BlockScaled | Tensor, out_dtype: torch.dtype
) -> tuple[BlockScaled, BlockScaled]:
    """x and w themselves. Raises ValueError for operands that scaled_grouped_mm does not take on any device."""
    x, w = _of_one_format(x, w, GROUPED_TAKES)
    if len(w.shape) != 3:
        raise Refused(f"w has shape {tuple(w.shape)}; {GROUPED_TAKES}")
    experts, n, k = w.shape
    if out_dtype != torch.bfloat16:
        raise Refused(f"out_dtype is {out_dtype}; {GROUPED_TAKES}")
    if experts > MOST_EXPERTS:
        raise Refused(f"w has {experts} experts; {GROUPED_TAKES}")
    if x.format.padded(k) % 32 or n % 16:
        raise Refused(f"K is {x.format.padded(k)} in whole blocks and N {n}; {GROUPED_TAKES}")
    if w.global_scale is not None and w.global_scale.numel() not in (1, experts):
        raise Refused(f"w has global scales {tuple(w.global_scale.shape)}; {GROUPED_TAKES}")
    return x, w


Scaled = TypeVar("Scaled", bound=BlockScaled)


def _of_one_format(x: Scaled | Tensor, w: Scaled | Tensor, accepted: str) -> tuple[Scaled, Scaled]:
    formats = [str(t.dtype) if isinstance(t, Tensor) else t.format.name for t in (x, w)]
    if isinstance(x, Tensor) or isinstance(w, Tensor) or formats not in (["nvfp4", "nvfp4"], ["mxfp8", "mxfp8"]):
        raise Refused(f"x is {formats[0]} and w {formats[1]}; {accepted}")
    return x, w


def _global_scales(x_global: Tensor, ends: Tensor, of_row: Tensor) -> tuple[Tensor, Tensor | None]:
    """(x's global scale for each expert [E], the ratio of each row's global scale to its expert's [T, 1]).

    The ratio is None where all of x has one global scale.
    """
    experts = len(ends)
    if x_global.numel() == 1:
        return x_global.reshape(1).expand(experts).contiguous(), None
    begins = torch.cat([ends.new_zeros(1), ends[:-1]]).clamp(max=len(x_global) - 1)
    of_expert = x_global.reshape(-1)[begins]
    return of_expert, x_global / of_expert[of_row.clamp(max=experts - 1)][:, None]


def _recipe(t: BlockScaled) -> tuple[list[ScalingType], list[SwizzleType]]:
    """The kinds of the scales of t, and their layouts, as torch's functions take them."""
    scaling, swizzle = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    if t.format.name == "nvfp4":
        return [scaling.BlockWise1x16, scaling.TensorWise], [swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE]
    return [scaling.BlockWise1x32], [swizzle.SWIZZLE_32_4_4]


def _codes(t: BlockScaled) -> Tensor:
    """The codes in the dtype that torch's functions take."""
    codes = t.codes.contiguous()  # before the view: torch may have no strided copy of float4
    return codes.view(torch.float4_e2m1fn_x2) if t.format.codes_per_byte == 2 else codes


def _matrix(t: QTensor) -> tuple[Tensor, list[Tensor]]:
    """The codes [rows, K] as scaled_mm takes them, and the scales: swizzled, then the global one where there is one."""
    codes, scales = (part.reshape(t.shape[:-1].numel(), part.shape[-1]) for part in (_codes(t), t.scales))
    global_scale = [] if t.global_scale is None else [t.global_scale]
    return codes, [ops.swizzle(scales), *global_scale]
