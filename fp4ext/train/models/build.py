"""Models of the two kinds that a Preset names: `transformer`, ours, and `inkling2`, transformers' Inkling2ForCausalLM.

Ours is row-invariant to the bit and decodes through a cache, in any batch. torch orders the sums of theirs by the shape
of a batch; so it is sampled without a cache, always in one shape (sampler.Whole), and the trainer measures in that
shape too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fp4ext
from fp4ext import Policy, Report
from fp4ext.policy import policies

from ..runs.presets import Preset, Shape
from . import cache, inkling2, products
from .transformer import Transformer


def fresh(policy: str | Policy, preset: Preset, seed: int, device: torch.device) -> tuple[nn.Module, Report]:
    """A model for pretraining under the policy, its weights decided by the seed, and what convert did."""
    policy = policies.get(policy)
    if preset.model == "inkling2":
        model = inkling2.build(preset.shape, seed).to(device)
        return model, inkling2.convert(model, policy)
    model = Transformer(preset.shape, seed).to(device)
    report = Report(policy.name)
    if policy.name != "bf16":
        report = fp4ext.convert(model, policy)
    if not products.native(device):
        products.serve_bf16(model)
    return model, report


def of_weights(
    kind: str, shape: Shape, weights: dict[str, Tensor], policy: Policy | None, kv_cache: str = "bf16"
) -> nn.Module:
    """A model for the stages of RL, of those weights, under a policy (None: BF16)."""
    if kind == "inkling2":
        model = inkling2.build(shape, seed=0)
        model.load_state_dict(weights)
        inkling2.convert(model, policy or policies.get("bf16"))
        return model
    model = Transformer(shape)
    model.load_state_dict(weights)
    if policy is not None:
        fp4ext.convert(model, policy)
    products.serve_invariant(model)
    model.set_cache(cache.FORMATS[kv_cache])
    return model


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """fp32 [batch, time, vocab] of tokens [batch, time]; autocast is around our model, and inside theirs."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=isinstance(model, Transformer)):
        out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits
