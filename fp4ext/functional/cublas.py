"""cublas: the product by torch's scaled_mm, which hands codes and swizzled scales to cuBLASLt as they are.

An order of summation of its own, by shape: rows are not invariant. Where there is a bias, or a tensor to add to, the
product comes in fp32 and is rounded once, after the addition.

Experts go through torch's scaled_grouped_mm, over rows: y[rows_e] = x[rows_e]·w[e]ᵀ. It wants each expert's scales
padded to 128 rows in the tensor cores' layout, and reads the offsets on the device; so does ops.swizzle, and nothing
waits for either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import Refused
from . import ops
from .qtensor import QTensor

LEAST = (10, 0)  # the compute capability
GROUPED_MAJOR = 10  # of the devices whose experts torch multiplies
MOST_EXPERTS = 1024  # torch counts them in one block of threads
TAKES = (
    "backend 'cublas' takes NVFP4·NVFP4 with K a multiple of 32, or MXFP8·MXFP8; N a multiple of 16; "
    "global scales of one value (outer='tensor' or 'pow2')"
)
GROUPED_TAKES = (
    f"backend 'cublas' takes experts over rows, at most {MOST_EXPERTS}, into bfloat16: NVFP4·NVFP4 with K a multiple "
    "of 32, or MXFP8·MXFP8; N a multiple of 16; w's global scales one an expert"
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
    """Why torch does not multiply experts there, or None."""
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
        ValueError: operands that TAKES does not name. RuntimeError: a device that cannot.
    """
    takes(x, w)
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


def takes(x: QTensor | Tensor, w: QTensor | Tensor) -> None:
    """Refuse operands that scaled_mm would not take, whatever the device. Raises ValueError."""
    formats = [t.format.name if isinstance(t, QTensor) else str(t.dtype) for t in (x, w)]
    if formats not in (["nvfp4", "nvfp4"], ["mxfp8", "mxfp8"]):
        raise Refused(f"x is {formats[0]} and w {formats[1]}; {TAKES}")
    k = x.format.padded(x.shape[-1])
    if k % 32 or w.shape[0] % 16:
        raise Refused(f"K is {k} in whole blocks and N {w.shape[0]}; {TAKES}")
    for name, t in (("x", x), ("w", w)):
        if t.global_scale is not None and t.global_scale.numel() != 1:
            raise Refused(f"{name} has global scales {tuple(t.global_scale.shape)}; {TAKES}")


def grouped_gemm(
    x: QTensor | Tensor, w: QTensor | Tensor, offsets: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """y[rows_e] = x̂[rows_e]·ŵ[e]ᵀ, [T, N], rows of nobody being zero. The arguments are those of fp4ext.grouped_gemm.

    torch's kernel has one global scale an expert: that of x is taken from the expert's first row. Where its other rows
    have another (outer="row"), y is rounded to bfloat16 before that scale and again after it.

    Raises:
        ValueError: operands that GROUPED_TAKES does not name. RuntimeError: a device that cannot.
    """
    grouped_takes(x, w, out_dtype)
    why = grouped_status(x.device.index)
    if why is not None:
        raise RuntimeError(f"backend 'cublas' is not available for experts: {why}")
    (rows, _), (experts, n, _) = x.shape, w.shape
    if rows == 0 or n == 0:
        return torch.zeros(rows, n, dtype=out_dtype, device=x.device)
    ends = offsets.clamp(0, rows).cummax(0).values  # as our kernels take those that lie; torch's would stop the device
    of_row = torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=x.device), right=True)
    scales_x, scales_w = [ops.swizzle(x.scales, ends)], [ops.swizzle(w.scales)]
    factor = None
    if x.global_scale is not None:
        of_expert, factor = _global_scales(x, ends, of_row)
        scales_x.append(of_expert)
        scales_w.append(w.global_scale.reshape(-1).expand(experts).contiguous())
    recipe, swizzled = _recipe(x)
    y = torch.nn.functional.scaled_grouped_mm(
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
    return y.where((of_row < experts).unsqueeze(1), 0)  # torch leaves rows of nobody as they were


def grouped_takes(x: QTensor | Tensor, w: QTensor | Tensor, out_dtype: torch.dtype) -> None:
    """Refuse what scaled_grouped_mm would not take, whatever the device. Raises ValueError."""
    formats = [t.format.name if hasattr(t, "format") else str(t.dtype) for t in (x, w)]
    if formats not in (["nvfp4", "nvfp4"], ["mxfp8", "mxfp8"]):
        raise Refused(f"x is {formats[0]} and w {formats[1]}; {GROUPED_TAKES}")
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


def _global_scales(x: QTensor, ends: Tensor, of_row: Tensor) -> tuple[Tensor, Tensor | None]:
    """x's for each expert [E], and by what each row's differs from its expert's [T, 1]: by 1 unless outer="row"."""
    experts, (rows, _) = len(ends), x.shape
    if x.global_scale.numel() == 1:
        return x.global_scale.reshape(1).expand(experts).contiguous(), None
    begins = torch.cat([ends.new_zeros(1), ends[:-1]]).clamp(max=rows - 1)
    of_expert = x.global_scale.reshape(-1)[begins]
    return of_expert, x.global_scale / of_expert[of_row.clamp(max=experts - 1)][:, None]


def _recipe(t: QTensor) -> tuple[list, list]:
    """How torch is told what the scales of t are, and how they lie."""
    scaling, swizzle = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    if t.format.name == "nvfp4":
        return [scaling.BlockWise1x16, scaling.TensorWise], [swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE]
    return [scaling.BlockWise1x32], [swizzle.SWIZZLE_32_4_4]


def _codes(t: QTensor) -> Tensor:
    """As torch knows them."""
    codes = t.codes.view(torch.float4_e2m1fn_x2) if t.format.codes_per_byte == 2 else t.codes
    return codes.contiguous()


def _matrix(t: QTensor) -> tuple[Tensor, list[Tensor]]:
    """[rows, K] of codes as scaled_mm knows them, and its scales: swizzled, then the global one where there is one."""
    codes, scales = (part.reshape(t.shape[:-1].numel(), part.shape[-1]) for part in (_codes(t), t.scales))
    global_scale = [] if t.global_scale is None else [t.global_scale]
    return codes, [ops.swizzle(scales), *global_scale]
