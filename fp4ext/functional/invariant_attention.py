"""attention: causal attention with a fixed order of summation.

    y_i = Σ_{j ≤ i} softmax_j(scale · q_i·k_j) v_j

A row of y is a function of its query and of the keys and values that it reads. Its bits are the same alone and in a
batch, in a prefill and in a decode through a cache, and on any number of threads, so that a sampler and a trainer agree
exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .autograd import Context, first_derivative
from .quantization import check_device, check_input


def attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Causal attention with a fixed order of summation.

    Args:
        q: [B, H, M, D] in fp32, bf16 or fp16, any strides.
        k, v: [B, G, T, D], both of one dtype, where G divides H: query head h reads key-value head h // (H/G). They may
            be a cache: keys and values past a query's position are not read.
        start: int64 [B]. Query i of sequence b is at position start[b] + i and reads the keys 0 … start[b] + i. Zeros
            are a prefill; the lengths of the sequences before this call, with M = 1, are a decode step of sequences of
            different lengths. None: the queries are at the last M of the T positions.
        scale: what the scores q·k are multiplied by; None: 1/√D.

    Returns:
        [B, H, M, D] in the dtype of q. The backward uses torch's fp32 operations: it holds M·T scores per head in
        memory and is not row-invariant. A row whose scores include NaN or +inf, or are all -inf, is NaN.

    Raises:
        TypeError: a dtype that is not accepted. ValueError: devices that differ.
        RuntimeError: shapes or a start that do not fit; a tensor with a tangent, inside a transform of torch.func or
            traced by torch.jit.

    Source: docs/numerics.md, section 11.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_input(name, t)
        check_device(name, t, q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        y: Tensor = _Attention.apply(q, k, v, start, scale)  # type: ignore[no-untyped-call]  # torch has no types here
        return y
    return ops.attention(q, k, v, start, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, start)
        ctx.scale = scale
        return ops.attention(q, k, v, start, scale)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, start = ctx.saved_tensors
        (batch, heads, m, d), (groups, t) = q.shape, k.shape[1:3]
        shape = (batch, groups, heads // max(groups, 1), m, d)
        with torch.autocast(q.device.type, enabled=False):
            qf, dyf = (x.float().reshape(shape) for x in (q, dy))
            kf, vf = (x.float()[:, :, None] for x in (k, v))  # all query heads of a group read one key-value head
            scores = (qf @ kf.mT * ctx.scale).masked_fill(~_mask(start, batch, m, t, q.device), -torch.inf)
            p = scores.softmax(-1)
            dp = dyf @ vf.mT
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * ctx.scale
            dq, dk, dv = (ds @ kf).view(q.shape), (ds.mT @ qf).sum(2), (p.mT @ dyf).sum(2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _mask(start: Tensor | None, batch: int, m: int, t: int, device: torch.device) -> Tensor:
    """Which keys each query reads, bool [B, 1, 1, M, T]."""
    first = torch.full((batch,), t - m, device=device) if start is None else start
    positions = first[:, None] + torch.arange(m, device=device)
    return (torch.arange(t, device=device) <= positions[..., None])[:, None, None]
