"""The reference model: a decoder-only transformer over bytes.

    x ← embed(bytes)
    x ← x + out(attention(rope(q), rope(k), v)),   q, k, v = qkv(norm(x))         for each block
    x ← x + down(silu(gate) · up),                 gate, up = gate_up(norm(x))
    logits = lm_head(norm(x))

With experts the second line is a mixture (moe.py). The residual stream and the norms are fp32; under autocast the
products are BF16. `fp4ext.convert` swaps the four Linears of each block (and the experts) and nothing else, which is 24
of 25 multiplications at the tiny preset. q, k, v (and gate, up) share one matrix, because they share one input: it is
quantized once.

In the stages of RL attention sums in a fixed order (fp4ext.attention), so that with row-invariant products
(products.py) a token's logits depend on that token and its past alone: fed whole, or one by one through a `Past`, in
any batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp4ext
from fp4ext.nn.activation import swiglu

from ..runs.presets import Shape
from .cache import Past, rounded
from .moe import MoE


class RMSNorm(nn.Module):
    """x / rms(x) · weight, in fp32."""

    def __init__(self, d: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Rope(nn.Module):
    """Rotary positions: the pair (x_i, x_{i+h}) turns by position · base^(-i/h), h = head_dim / 2."""

    def __init__(self, head_dim: int, context: int, base: float = 10_000.0):
        super().__init__()
        half = head_dim // 2
        angle = torch.outer(torch.arange(context).float(), base ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """x [batch, heads, time, head_dim]; `start` [batch]: the position of the first of them, default 0."""
        if start is None:
            cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        else:
            positions = start[:, None, None] + torch.arange(x.shape[-2])
            cos, sin = self.cos[positions], self.sin[positions]
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √head_dim) v over the past; in the stages of RL in an order that no batch changes.

    While pretraining a CPU does it in fp32: torch's BF16 attention takes thrice as long.
    """
    if fp4ext.current_stage() != "pretrain":
        return fp4ext.attention(q, k, v, start)
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(v.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.layer, self.heads, self.head_dim = layer, shape.heads, shape.head_dim
        self.cache: fp4ext.Spec | None = None
        self.qkv = nn.Linear(shape.d, 3 * shape.d, bias=False)
        self.out = nn.Linear(shape.d, shape.d, bias=False)

    def forward(self, x: Tensor, rope: Rope, past: Past | None) -> Tensor:
        batch, time, d = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        start = past and past.start
        q, k = rope(q, start), rope(k, start)
        if past:
            k, v = past.extend(self.layer, k, v)
        elif fp4ext.current_stage() != "pretrain":
            k, v = rounded(k, self.cache), rounded(v, self.cache)
        y = attend(q, k, v, start)
        return self.out(y.transpose(1, 2).reshape(batch, time, d))


class SwiGLU(nn.Module):
    def __init__(self, d: int, ffn: int):
        super().__init__()
        self.gate_up = nn.Linear(d, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


class Block(nn.Module):
    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(shape.d), Attention(shape, layer)
        dense = SwiGLU(shape.d, shape.ffn) if shape.ffn else None
        self.mlp_norm, self.mlp = RMSNorm(shape.d), MoE(shape, dense) if shape.experts else dense

    def forward(self, x: Tensor, rope: Rope, past: Past | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, past)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Bytes in, logits (or the mean cross-entropy in nats, when targets are given) out.

    Args:
        shape: the sizes.
        seed: decides the initial weights, whatever torch's global generator holds.
    """

    def __init__(self, shape: Shape, seed: int = 0):
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.d)
        self.rope = Rope(shape.head_dim, shape.context)
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = RMSNorm(shape.d)
        self.lm_head = nn.Linear(shape.d, shape.vocab, bias=False)
        self.init_weights(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Products of unit variance; branches shrunk, so that the residual stream keeps its size; a head of zeros."""
        for name, p in self.named_parameters():
            if p.ndim < 2:
                continue
            std = 1.0 if name == "embed.weight" else p.shape[-1] ** -0.5
            if name.endswith(("out.weight", "down.weight", "down_proj")):
                std /= math.sqrt(2 * self.shape.layers)
            p.normal_(0.0, std, generator=generator)
        self.lm_head.weight.zero_()

    def set_cache(self, spec: fp4ext.Spec | None) -> None:
        """How keys and values are rounded in the stages of RL, where sequences are decoded through a cache of them."""
        for block in self.blocks:
            block.attention.cache = spec

    def forward(self, tokens: Tensor, targets: Tensor | None = None, past: Past | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.rope, past)
        logits = self.lm_head(self.norm(x)).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, -2), targets.flatten())
