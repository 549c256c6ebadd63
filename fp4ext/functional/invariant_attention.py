"""attention: each query over its own past, in an order that no batch changes.

    y_i = Σ_{j ≤ i} softmax_j(scale · q_i·k_j) v_j

A row of y is a function of its query and of the keys and values it reads: the same bits alone or in a batch, in a
prefill or in a decode through a cache, on any number of threads. That is what a sampler and a trainer need to agree
exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .autograd import first_derivative
from .quantization import check_device, check_input


def attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Causal attention with a fixed order of summation.

    Args:
        q: [B, H, M, D] in fp32, bf16 or fp16, any strides.
        k, v: [B, G, T, D] of one dtype, G dividing H: query head h reads kv head h // (H/G). They may be a cache: what
            lies past a query's position is not read, whatever it holds.
        start: int64 [B]: query i of sequence b is at position start[b] + i and reads keys 0 to there, its own included.
            0 is a prefill; with M = 1 and the lengths of the sequences it is a decode step of a ragged batch. None: the
            queries are the last M of T.
        scale: of the products; None: 1/√D.

    Returns:
        [B, H, M, D] in the dtype of q. It has a gradient, in plain fp32 operations of torch: M·T scores a head in
        memory, and not row-invariant.

    Raises:
        TypeError: a dtype that is not accepted. ValueError: devices that differ.
        RuntimeError: shapes or a start that don't fit; a tensor with a tangent, inside a transform of torch.func or
            traced by torch.jit.

    Source: docs/numerics.md, 11. A row that meets a NaN or +inf among its scores, or nothing but -inf, is NaN.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_input(name, t)
        check_device(name, t, q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return _Attention.apply(q, k, v, start, scale)
    return ops.attention(q, k, v, start, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, start, scale):
        ctx.save_for_backward(q, k, v, start)
        ctx.scale = scale
        return ops.attention(q, k, v, start, scale)

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        q, k, v, start = ctx.saved_tensors
        (batch, heads, m, d), (groups, t) = q.shape, k.shape[1:3]
        shape = (batch, groups, heads // max(groups, 1), m, d)
        with torch.autocast(q.device.type, enabled=False):
            qf, dyf = (x.float().reshape(shape) for x in (q, dy))
            kf, vf = (x.float()[:, :, None] for x in (k, v))  # every head of a group reads the same
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
