"""gemm: y = x̂·ŵᵀ + bias, contraction last on both operands."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import Refused
from . import cublas, ops
from .fakes import ACCUMULATE
from .qtensor import QTensor
from .quantization import check_device, check_input

BACKENDS = {"cpu": ("auto", "cpu"), "cuda": ("auto", "emulated", "fast", "cublas", "native")}
VARIANT = ("fast", "cublas")  # backends whose rows depend on the shape of the whole


def gemm(
    x: QTensor | Tensor,
    w: QTensor | Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: str = "invariant",
    backend: str = "auto",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply quantized (or plain) matrices: y[.., m, n] = Σ_k x̂[.., m, k]·ŵ[n, k] + bias[n].

    Args:
        x: [.., M, K], a QTensor of any format, or a plain fp32, bf16 or fp16 tensor.
        w: [N, K], likewise; formats may differ.
        bias: [N], fp32, bf16 or fp16.
        out_dtype: torch.bfloat16 or torch.float32.
        accumulate: "invariant": a row of y depends on that row of x and on w alone, not on M, the other rows or the
            threads. "fast": the backend's fastest order, which on CUDA may be "fast". The CPU has one order, invariant
            and documented.
        backend: "auto"; for tensors of the CPU "cpu"; for CUDA "emulated" or "native", or with accumulate="fast" also
            "fast" or "cublas" (fp4ext.backends()).
        out: fp32 [.., M, N], contiguous: the product in fp32, with its bias, is added to it, and it is returned;
            out_dtype then counts for nothing. So a weight gradient gathers over micro-batches. It shares memory with no
            other argument. Its version counter goes up, as after torch's own in-place operations.

    Returns:
        [.., M, N] in out_dtype, or out. No gradient flows through it: fp4ext.linear has a backward.

    Raises:
        ValueError: lengths of K or devices that differ, an unknown choice. TypeError: a dtype that is not accepted.
        RuntimeError: shapes that don't fit; an out that overlaps an operand, is a leaf that requires grad (unless under
            torch.no_grad) or an inference tensor; an operand with a tangent, inside a transform of torch.func or traced
            by torch.jit.

    Source: docs/numerics.md, 9.
    """
    operands = *operand("x", x), *operand("w", w)
    check_choices(out_dtype, accumulate, backend, x.device)
    if bias is not None:
        check_input("bias", bias)
        check_device("bias", bias, x)
        bias = bias.detach()
    check_device("w", w, x)
    if len(w.shape) != 2:
        raise Refused(f"w has shape {tuple(w.shape)}; accepted: [N, K]")
    if len(x.shape) < 1 or x.shape[-1] != w.shape[-1]:
        raise Refused(f"x {tuple(x.shape)} and w {tuple(w.shape)} differ in K, their last axis")
    if out is not None:
        check_device("out", out, x)
        ops.check_plain("out", out)
        ops.check_written(out)
    if backend == "cublas":
        return cublas.gemm(x, w, bias, out_dtype, out)
    if out is not None:
        ops.gemm_add(*operands, bias, out.detach(), accumulate, backend)
        return out
    return ops.gemm(*operands, bias, ops.dtype_name(out_dtype), accumulate, backend)


def check_choices(out_dtype: torch.dtype, accumulate: str, backend: str, device: torch.device) -> None:
    """Raises ValueError or TypeError for a choice that no GEMM has."""
    if accumulate not in ACCUMULATE:
        raise Refused(f"unknown accumulate {accumulate!r}; accepted: {', '.join(ACCUMULATE)}")
    accepted = BACKENDS.get(device.type, ("auto",))
    if backend not in accepted:
        raise Refused(
            f"unknown backend {backend!r} on {device.type}; accepted: {', '.join(accepted)} "
            "(fp4ext.backends() says why not others)"
        )
    if backend in VARIANT and accumulate == "invariant":
        raise Refused(f"backend {backend!r} is not row-invariant; accepted with it: accumulate='fast'")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"out_dtype is {out_dtype}; accepted: torch.bfloat16, torch.float32")


def operand(name: str, t: QTensor | Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    """(codes, scales, global scale, format) of an operand; `name` is for errors."""
    if isinstance(t, QTensor):
        return t.codes, t.scales, t.global_scale, t.format.name
    check_input(name, t)
    return t.detach(), None, None, {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[t.dtype]
