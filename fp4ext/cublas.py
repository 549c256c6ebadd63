"""cublas: the product by torch's scaled_mm, which hands codes and swizzled scales to cuBLASLt as they are.

An order of summation of its own, by shape: rows are not invariant. Where there is a bias, or a tensor to add to, the
product comes in fp32 and is rounded once, after the addition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .qtensor import QTensor

LEAST = (10, 0)  # the compute capability
TAKES = (
    "backend 'cublas' takes NVFP4·NVFP4 with K a multiple of 32, or MXFP8·MXFP8; N a multiple of 16; "
    "global scales of one value (outer='tensor' or 'pow2')"
)


def status(device: int) -> str:
    """One line for fp4ext.backends(): "available: …" or "built, but …"."""
    major, minor = torch.cuda.get_device_capability(device)
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"built, but torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if (major, minor) < LEAST:
        return f"built, but this device is sm_{major}{minor}, and it needs sm_{LEAST[0]}{LEAST[1]}"
    return "available: torch's scaled_mm, with accumulate='fast'; not row-invariant, global scales multiplied in fp32"


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
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; accepted: a contiguous float32 {shape}")
    scaling, swizzle = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    if x.format.name == "nvfp4":
        recipe, swizzled = [scaling.BlockWise1x16, scaling.TensorWise], [swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE]
    else:
        recipe, swizzled = [scaling.BlockWise1x32], [swizzle.SWIZZLE_32_4_4]
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
        raise ValueError(f"x is {formats[0]} and w {formats[1]}; {TAKES}")
    k = x.format.padded(x.shape[-1])
    if k % 32 or w.shape[0] % 16:
        raise ValueError(f"K is {k} in whole blocks and N {w.shape[0]}; {TAKES}")
    for name, t in (("x", x), ("w", w)):
        if t.global_scale is not None and t.global_scale.numel() != 1:
            raise ValueError(f"{name} has global scales {tuple(t.global_scale.shape)}; {TAKES}")


def _matrix(t: QTensor) -> tuple[Tensor, list[Tensor]]:
    """[rows, K] of codes as scaled_mm knows them, and its scales: swizzled, then the global one where there is one."""
    codes, scales = (part.reshape(t.shape[:-1].numel(), part.shape[-1]) for part in (t.codes, t.scales))
    if t.format.codes_per_byte == 2:
        codes = codes.view(torch.float4_e2m1fn_x2)
    global_scale = [] if t.global_scale is None else [t.global_scale]
    return codes.contiguous(), [ops.swizzle(scales), *global_scale]
