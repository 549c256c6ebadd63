"""quantize: a tensor in, a QTensor out."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .formats import Format
from .qtensor import QTensor
from .spec import Spec


def quantize(
    x: Tensor,
    format: str | Format | Spec = "nvfp4",
    *,
    scale: str | None = None,
    rounding: str = "nearest",
    block: str | None = None,
    outer: str | None = None,
    rht: str | int | None = None,
    axis: int = -1,
    rng: Tensor | int | None = None,
    role: str = "x",
    amax: Tensor | None = None,
) -> QTensor:
    """Quantize x along its last axis, or the transpose of its last two axes.

    Args:
        x: fp32, bf16 or fp16, any number of dimensions, any strides.
        format: "nvfp4", "mxfp8", "mxfp8_e5m2", "mxfp4", or a whole Spec, which then says everything up to `rht`.
        scale, rounding, block, outer, rht: see Spec.
        axis: -1; or -2 for x.mT, whose contraction is x's second last axis: the copy that a backward GEMM wants.
        rng: where random bits come from: an int seed, or an int64 tensor {seed, offset} or {seed, offset, row, k}
            (row and k: the logical place of a shard's first element). Default: drawn from torch's generator if the spec needs it.
        role: "x", "w" or "dy": tensors of different roles have different random bits under one rng.
        amax: the outer groups' largest magnitudes (fp32, of the shape of global_scale), where x is a shard of a larger tensor.

    Returns:
        A QTensor of shape [.., rows, K].

    Raises:
        ValueError: an unknown or biased combination (see Spec), or an unknown role.
        TypeError: a dtype that is not accepted.
        RuntimeError: an argument of the wrong shape or device.

    Source: docs/numerics.md, 2-7.
    """
    if isinstance(format, Spec):
        spec = format
    else:
        spec = Spec(format.name if isinstance(format, Format) else format, scale, rounding, block, outer, rht)
    check_input("x", x)
    if role not in ops.ROLES:
        raise ValueError(f"unknown role {role!r}; accepted: {', '.join(ops.ROLES)}")
    if axis not in (-1, -2):
        raise ValueError(f"axis is {axis}; accepted: -1 (along the last axis), -2 (the transpose, along its last axis)")
    state = rng_state(rng, x.device, spec)
    codes, scales, outer_scale = ops.quantize(x, spec.key, axis, state, ops.ROLES[role], amax)
    return wrap(x, spec, axis, codes, scales, outer_scale)


def wrap(x: Tensor, spec: Spec, axis: int, codes: Tensor, scales: Tensor, outer_scale: Tensor) -> QTensor:
    """The QTensor of what an op made of x."""
    shape = x.shape if axis == -1 else (*x.shape[:-2], x.shape[-1], x.shape[-2])
    fmt = spec.fmt
    return QTensor(codes, scales, outer_scale if fmt.has_global_scale else None, fmt, torch.Size(shape), x.dtype)


def rng_state(rng: Tensor | int | None, device: torch.device, spec: Spec) -> Tensor | None:
    """What `rng` means for this spec, as the tensor that an op takes; None where nothing is random."""
    if not spec.needs_rng:
        return None
    if rng is None:
        return ops.draw_rng(torch.empty(0, device=device), 1)[0]
    if isinstance(rng, int):
        return torch.tensor([rng, 0], dtype=torch.int64, device=device)
    return rng


def check_input(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; accepted: a torch.Tensor")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        why = " (rounding float64 twice is not rounding it once)" if x.dtype == torch.float64 else ""
        raise TypeError(f"{name} is {x.dtype}; accepted: float32, bfloat16, float16{why}")
