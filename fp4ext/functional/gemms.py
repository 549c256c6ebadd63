"""gemm: y = x̂·ŵᵀ + bias, contraction last on both operands."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import Refused
from . import cublas, ops
from .fakes import ACCUMULATE, Stored
from .qtensor import BlockScaled, QTensor
from .quantization import check_device, check_input

BACKENDS = {"cpu": ("auto", "cpu"), "cuda": ("auto", "emulated", "fast", "cublas", "native")}
VARIANT = ("fast", "cublas")  # the backends that are not row-invariant


def gemm(
    x: QTensor | Tensor,
    w: QTensor | Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    accumulate: str = "invariant",
    backend: str = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Multiply quantized (or plain) matrices: y[.., m, n] = Σ_k x̂[.., m, k]·ŵ[n, k] + bias[n].

    Args:
        x: [.., M, K], a QTensor of any format, or a plain fp32, bf16 or fp16 tensor.
        w: [N, K], a QTensor or a plain tensor; its format may differ from that of x.
        bias: [N], fp32, bf16 or fp16.
        out_dtype: torch.bfloat16 or torch.float32.
        accumulate: "invariant": a row of y depends on that row of x and on w alone, not on M, the other rows or the
            threads. "fast": the fastest order of summation; on CUDA that may be backend "fast". The CPU has one order,
            which is invariant.
        backend: "auto"; on the CPU "cpu"; on CUDA "emulated" or "native", and with accumulate="fast" also "fast" or
            "cublas". fp4ext.backends() says which are available.
        out: fp32 [.., M, N], contiguous, for example a weight gradient that is accumulated over micro-batches. The
            product in fp32, with its bias, is added to it, and it is returned; out_dtype is ignored. It may share
            memory with no other argument. Its version counter is incremented, as by torch's own in-place operations.

    Returns:
        [.., M, N] in out_dtype, or out. No gradient flows through it: fp4ext.linear has a backward.

    Raises:
        ValueError: K or devices that differ, an unknown accumulate or backend. TypeError: a dtype that is not accepted.
        RuntimeError: shapes that do not fit; an out that overlaps an operand, is a leaf that requires grad (unless
            under torch.no_grad) or an inference tensor; an operand with a tangent, inside a transform of torch.func or
            traced by torch.jit; a backend that is not available.

    Source: docs/numerics.md, section 9.
    """
    operands = operand("x", x), operand("w", w)
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
    """Raises ValueError or TypeError for an out_dtype, accumulate or backend that no GEMM has."""
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


def operand(name: str, t: BlockScaled | Tensor, quantized: type[BlockScaled] = QTensor) -> Stored:
    """(codes, scales, global scale, format) of a plain tensor or of a `quantized` one; `name` is for errors."""
    if isinstance(t, quantized):
        return t.codes, t.scales, t.global_scale, t.format.name
    plain = check_input(name, t).detach()
    return plain, None, None, {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[plain.dtype]
