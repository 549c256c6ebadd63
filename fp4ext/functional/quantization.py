"""quantize: a tensor in, a QTensor out."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import Refused
from ..policy.formats import Format
from ..policy.spec import Spec, as_spec
from . import ops
from .qtensor import QTensor


def quantize(
    x: Tensor | QTensor,
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
        x: fp32, bf16 or fp16, any number of dimensions, any strides. Or a QTensor: its dequantized values (in fp32) are
            quantized anew, along either axis, without a whole copy of them in memory.
        format: "nvfp4", "mxfp8", "mxfp8_e5m2", "mxfp4", a Format; or a whole Spec or its key, such as
            "nvfp4/sweep", which then says everything up to `rht`.
        scale, rounding, block, outer, rht: see Spec.
        axis: -1; or -2 for x.mT, whose contraction is x's second last axis: the copy that a backward GEMM wants.
        rng: where random bits come from: an int seed, or an int64 tensor {seed, offset} or {seed, offset, row, k}
            (row and k: the logical place of a shard's first element, from 0 to 2^32 - 1; k is a multiple of the block,
            and of the RHT's length). Default: drawn from torch's generator if the spec needs it.
        role: "x", "w" or "dy": tensors of different roles have different random bits under one rng.
        amax: the outer groups' largest magnitudes (fp32, of the shape of global_scale), where x is a shard of a larger
            tensor. Finite numbers from 0 on. (The values of rng and amax on a CUDA device are not read by the host, and
            so not checked.)

    Returns:
        A QTensor of shape [.., rows, K]; under an RHT it holds the rotated values. No gradient flows through it:
        fp4ext.linear has a backward.

    Raises:
        ValueError: an unknown or biased combination (see Spec), an unknown role or axis, another device than that of x.
        TypeError: a dtype that is not accepted.
        RuntimeError: an argument of the wrong shape, an amax or an rng out of range, x with a tangent, inside a
            transform of torch.func or traced by torch.jit.

    Source: docs/numerics.md, 2-7.
    """
    if not isinstance(x, QTensor):
        check_input("x", x)
    if isinstance(format, Spec) or (isinstance(format, str) and "/" in format):
        spec = as_spec(format)
        also = {"scale": scale, "block": block, "outer": outer, "rht": rht}
        also["rounding"] = None if rounding == "nearest" else rounding
        given = [f"{name}={value!r}" for name, value in also.items() if value is not None]
        if given:
            raise Refused(f"{', '.join(given)} beside the whole spec {spec}; accepted: spec.with_(…), or no spec")
    else:
        spec = Spec(format, scale, rounding, block, outer, rht)
    check_place(axis, role)
    if amax is not None:
        check_device("amax", amax, x)
        ops.check_plain("amax", amax)
    if isinstance(x, QTensor):
        if amax is not None:
            raise Refused("amax is given beside a QTensor; accepted: None, it is measured")
        state = rng_state(rng, x.codes, spec)
        out = ops.requantize(*x.stored(), spec.key, axis, state, ops.ROLES[role])
    else:
        state = rng_state(rng, x, spec)
        out = ops.quantize(x.detach(), spec.key, axis, state, ops.ROLES[role], amax)
    return wrap(x, spec, axis, *out)


def wrap(x: Tensor | QTensor, spec: Spec, axis: int, codes: Tensor, scales: Tensor, outer_scale: Tensor) -> QTensor:
    """The QTensor of what an op made of x."""
    shape = x.shape if axis == -1 else (*x.shape[:-2], x.shape[-1], x.shape[-2])
    fmt = spec.fmt
    return QTensor(codes, scales, outer_scale if fmt.has_global_scale else None, fmt, torch.Size(shape), x.dtype)


def rng_state(rng: Tensor | int | None, x: Tensor, spec: Spec) -> Tensor | None:
    """What `rng` means for x and its spec, as the tensor that an op takes; None where nothing is random."""
    if rng is not None and not isinstance(rng, (int, Tensor)):
        raise TypeError(f"rng is {type(rng).__name__}; accepted: None, an int or an int64 tensor {{seed, offset}}")
    if not spec.needs_rng:
        return None
    if rng is None:
        return ops.draw_rng(x, 1)[0]
    if isinstance(rng, Tensor):
        check_device("rng", rng, x)
        return rng
    if not -(2**63) <= rng < 2**63:
        raise Refused(f"rng is {rng}; accepted: a seed of 64 bits, from -2^63 to 2^63 - 1")
    return torch.tensor([rng, 0], dtype=torch.int64, device=x.device)


def check_device(name: str, t: Tensor, x: Tensor) -> None:
    """Raises ValueError unless t is on the device of x."""
    if t.device != x.device:
        raise Refused(f"{name} is on {t.device}; accepted: {x.device}, where x is")


def check_place(axis: int, role: str) -> None:
    """Raises ValueError for an axis or a role that there is not."""
    if role not in ops.ROLES:
        raise Refused(f"unknown role {role!r}; accepted: {', '.join(ops.ROLES)}")
    if axis not in (-1, -2):
        raise Refused(f"axis is {axis}; accepted: -1 (along the last axis), -2 (the transpose, along its last axis)")


def check_input(name: str, x: Tensor) -> None:
    """Raises TypeError unless x is a tensor of a dtype that can be quantized; otherwise as ops.check_plain."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; accepted: a torch.Tensor")
    ops.check_plain(name, x)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        why = " (rounding float64 twice is not rounding it once)" if x.dtype == torch.float64 else ""
        raise TypeError(f"{name} is {x.dtype}; accepted: float32, bfloat16, float16{why}")
