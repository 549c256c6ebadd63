"""The arms of an RL comparison: who samples in what, who trains in what, and what guards against the difference. Data.

| arm | sampler | trainer's forward | its backward | guard |
|---|---|---|---|---|
| bf16 | BF16 | the same | BF16 | – |
| mismatched | 4 bits | BF16 | BF16 | – |
| tis | 4 bits | BF16 | BF16 | token TIS |
| rejection | 4 bits | BF16 | BF16 | sequence rejection |
| icepop | 4 bits | BF16 | BF16 | IcePop |
| matched | 4 bits | the same, to the bit | BF16 on the dequantized operands | – |
| amax | 4 bits, one amax a tensor | the same rule, on other batches | BF16 | – |
| quantized_backward | 4 bits | the same, to the bit | the policy's 4-bit backward | – |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import fp4ext
from fp4ext import Fprop, Policy, Recipe
from fp4ext.errors import Refused


@dataclass(frozen=True)
class Choice:
    """An arm's policies (None: BF16) and its guard."""

    name: str
    sampler: Policy | None
    trainer: Policy | None
    guard: str = "none"


NAMES = ("matched", "mismatched", "tis", "rejection", "icepop", "bf16", "amax", "quantized_backward")
DEFAULT = ("bf16", "mismatched", "matched")


def choose(name: str, policy: str | Policy) -> Choice:
    """The arm of that name, in the 4 bits of a policy. Raises Refused for an unknown one."""
    base = fp4ext.policies.get(policy)
    guards = {"tis": "token_tis", "rejection": "sequence_rejection", "icepop": "icepop"}
    if name == "bf16":
        return Choice(name, None, None)
    if name == "mismatched" or name in guards:
        return Choice(name, base, None, guards.get(name, "none"))
    if name == "matched":
        return Choice(name, base, base)
    if name == "amax":
        shared = base.with_(rl_sampler=_outer_of_the_tensor(base), rl_trainer=None)
        return Choice(name, shared, shared)
    if name == "quantized_backward":
        sampler = base.recipe("rl_sampler", "")
        whole = base.with_(rl_trainer=replace(base.pretrain, fprop=sampler.fprop, mean_split=False))
        return Choice(name, whole, whole)
    raise Refused(f"unknown arm {name!r}; accepted: {', '.join(NAMES)}")


def _outer_of_the_tensor(policy: Policy) -> Recipe:
    fprop = policy.recipe("rl_sampler", "").fprop
    return Recipe(Fprop(*(s and s.with_(outer="tensor" if s.outer != "none" else None) for s in (fprop.x, fprop.w))))
