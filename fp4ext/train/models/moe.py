"""A mixture of experts in place of a block's SwiGLU.

    s = softmax(x·wᵀ)                              the router, in fp32; s [T, E]
    chosen = the top_k largest of s + bias         equal ones: the lower index; bias is no part of what follows
    y = shared(x) + Σ_i p_i · expert_{chosen_i}(x),   p = s[chosen] / Σ s[chosen]; s[chosen] where top_k is 1

No token is dropped: rows are sorted by expert, each expert computes however many there are, and a token's outputs are
added in fp32 from its first choice to its last. So in the stages of RL a token's y is a function of that token alone,
whoever else is in the batch.

Balance without a loss (arXiv 2408.15664): after each step `Balance` raises the bias of experts that had fewer tokens
than the mean and lowers that of the others, by `rate`, outside the gradient. The bias is state: a checkpoint holds it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fp4ext
from fp4ext.functional.grouped import expert_ends

from ..runs.presets import Shape
from .products import Product


class Router(nn.Module):
    """Which experts a token goes to, and with which weights.

    x [T, d] -> p fp32 [T, top_k], chosen int64 [T, top_k], from the first choice to the last.

    softmax is of the few functions of torch that give a row the same bits wherever it lies: fp32 sigmoid does not.
    """

    def __init__(self, shape: Shape):
        super().__init__()
        self.top_k = shape.top_k
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.d))
        self.register_buffer("selection_bias", torch.zeros(shape.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            scores = Product.apply(x.float(), self.weight.float(), torch.float32, True).softmax(-1)
            # topk breaks ties as it likes
            ranked = (scores.detach() + self.selection_bias).argsort(dim=-1, descending=True, stable=True)
            chosen = ranked[:, : self.top_k]
            p = scores.gather(-1, chosen)
            return p if self.top_k == 1 else p / added(p)[:, None], chosen


class MoE(nn.Module):
    """`shared` is the shared expert, [T, d] -> [T, d], or None."""

    def __init__(self, shape: Shape, shared: nn.Module | None):
        super().__init__()
        self.router = Router(shape)
        self.experts = fp4ext.Experts(shape.experts, shape.d, shape.expert_ffn, policy="bf16")
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        p, chosen = self.router(rows)
        (tokens, top_k), experts = chosen.shape, len(self.router.weight)
        chosen, order = chosen.flatten().sort(stable=True)
        offsets = expert_ends(chosen, experts)
        # Expanded and permuted, not gathered: the backward then has no sum whose order is open.
        copies = rows[:, None].expand(-1, top_k, -1).flatten(0, 1)
        y = self.experts(copies[order], offsets)[order.argsort()].view(tokens, top_k, -1)
        y = added(y.float() * p[..., None])
        if self.shared is not None:
            y = self.shared(rows).float() + y
        return y.view(x.shape)


def added(t: Tensor) -> Tensor:
    """The sum over axis 1, in order."""
    total, *rest = t.unbind(1)
    for part in rest:
        total = total + part
    return total


class Balance:
    """Counts the tokens of each expert while a model trains, and moves the selection biases.

    Works on every router whose forward ends with the chosen experts and whose bias is called as in NAMES: ours, and
    those of transformers' models.

    Args:
        rate: what a bias moves by in a step.
    """

    NAMES = ("selection_bias", "e_score_correction_bias")

    def __init__(self, model: nn.Module, rate: float = 1e-3):
        self.rate, self.counts = rate, {}
        for name, module in model.named_modules():
            bias = next((getattr(module, n) for n in self.NAMES if isinstance(getattr(module, n, None), Tensor)), None)
            if bias is not None:
                self.counts[name] = bias, torch.zeros(len(bias), dtype=torch.int64, device=bias.device)
                module.register_forward_hook(self._counter(self.counts[name][1]))

    @staticmethod
    def _counter(counts: Tensor):
        def count(router, given, out):
            if router.training and torch.is_grad_enabled():
                counts.add_(out[-1].flatten().bincount(minlength=len(counts)))

        return count

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Move the biases after a training step; what metrics.jsonl tells about it.

        load_max, load_min: the tokens of the busiest and of the idlest expert, in the worst layer, over an even share.
        """
        loads = []
        for bias, counts in self.counts.values():
            mean = counts.double().mean()
            bias += self.rate * (mean - counts).sign().to(bias.dtype)
            loads.append(counts / mean)
            counts.zero_()
        if not loads:
            return {}
        return {"load_max": max(x.max().item() for x in loads), "load_min": min(x.min().item() for x in loads)}
