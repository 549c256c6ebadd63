"""The models that RL knows: ours, whose rows are independent to the bit, and transformers' own Inkling2ForCausalLM.

Ours decodes through a cache, in any batch. Theirs adds up in torch's order, which the shape of a batch decides; so it
is sampled without a cache, always in one shape, and the trainer measures in that shape too (whole.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fp4ext

from .. import cache, inkling2, invariant
from ..model import Transformer
from ..presets import Shape
from ..sampler import Sampler
from ..whole import Whole


def build(
    kind: str, shape: Shape, weights: dict[str, Tensor], policy: fp4ext.Policy | None, kv_cache: str = "bf16"
) -> nn.Module:
    """A model of those weights under a policy (None: BF16)."""
    if kind == "inkling2":
        model = inkling2.build(shape, seed=0)
        model.load_state_dict(weights)
        inkling2.convert(model, policy or fp4ext.policies.get("bf16"))
        return model
    model = Transformer(shape)
    model.load_state_dict(weights)
    if policy is not None:
        fp4ext.convert(model, policy)
    invariant.serve(model)
    model.set_cache(cache.FORMATS[kv_cache])
    return model


def sampler(model: nn.Module, slots: int = 64, seed: int = 0) -> Sampler:
    """What samples from a model that `build` made, or from a packed copy of one."""
    return (Sampler if isinstance(model, Transformer) else Whole)(model, slots=slots, seed=seed)


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """fp32 [batch, time, vocab]."""
    with torch.autocast("cpu", torch.bfloat16, enabled=isinstance(model, Transformer)):
        out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits
