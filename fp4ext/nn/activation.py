"""SwiGLU's elementwise part, with the same bits for an element wherever it lies.

    swiglu([gate, up]) = silu(gate) · up,   silu(x) = x · σ(x)

torch's fp32 silu is not so: the last elements of a thread's share, those that fill no vector, go through another
exponential than the rest, and differ in the last bit now and then. In bf16 the rounding hides it: all 65,536 inputs
agree. So in the stages of RL, where a row must not depend on its mates, fp32 takes σ(x) from a softmax over (x, 0),
which computes every row alike; elsewhere silu is torch's, which is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..policy.stages import current_stage


def swiglu(gate_up: Tensor, stage: str | None = None) -> Tensor:
    """[.., 2F] -> [.., F]; gate is the first half. stage: of the module that calls; None: the thread's."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate, stage) * up


def silu(x: Tensor, stage: str | None = None) -> Tensor:
    """x · σ(x), any shape."""
    if (stage or current_stage()) == "pretrain" or x.dtype != torch.float32:
        return F.silu(x)
    return x * torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]
