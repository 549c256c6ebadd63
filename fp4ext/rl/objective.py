"""The policy loss of GRPO and of those that changed it, on token log-probs.

    ρ  = exp(logπ − logπ_old)                                        per token, or per sequence (GSPO)
    L  = −w · min(ρ·A, clip(ρ, 1 − low, 1 + high)·A),  and for A < 0 at most −w·dual·A        (dual clip)
         + β · KL(π_ref)                                             k1, k2 or k3

averaged over all tokens, over sequences of their means, or divided by a constant. π_old is the trainer's policy before
the update; w corrects for a sampler that is not π_old (bridge.py).

Sources, by arXiv number: PPO 1707.06347, eq. 7 (clip). GRPO 2402.03300, eq. 3 (group advantages, mean over sequences,
k3). Dual clip 1912.09729, eq. 5. DAPO 2503.14476, eqs. 8, 10 (clip-higher, mean over tokens), 13 (overlong).
Dr.GRPO 2503.20783, section 3.2 (no deviation, a constant normalizer). GSPO 2507.18071, eqs. 5, 7 (sequence ratio).
RLOO 2402.14740, eq. 8 (leave one out). k1, k2, k3: J. Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import Refused

BASELINES = ("group", "group_std", "leave_one_out")
RATIOS = ("token", "sequence")
MEANS = ("token", "sequence", "constant")
KLS = ("k1", "k2", "k3")


def advantages(rewards: Tensor, group: int, baseline: str = "group_std") -> Tensor:
    """How much better each completion is than the others of its prompt.

    Args:
        rewards: [n], the completions of a prompt one after the other, `group` of each.
        baseline: "group_std": (R − mean)/(standard deviation + 1e-6) (GRPO); 0 where a group's rewards are equal.
            "group": R − mean (Dr.GRPO). "leave_one_out": R − mean of the others (RLOO).

    Returns:
        [n].

    Raises:
        Refused: an unknown baseline, a number of rewards that is no multiple of the group, one completion per group for
            "leave_one_out".
    """
    _one_of("baseline", baseline, BASELINES)
    if group < 1 or rewards.numel() % group:
        raise Refused(f"{rewards.numel()} rewards in groups of {group}; accepted: whole groups")
    r = rewards.view(-1, group)
    a = r - r.mean(1, keepdim=True)
    if baseline == "leave_one_out":
        if group == 1:
            raise Refused("leave_one_out with groups of 1; accepted: groups of 2 or more")
        a = a * (group / (group - 1))
    elif baseline == "group_std":
        a = a / (r.std(1, correction=0, keepdim=True) + 1e-6)
    return a.flatten()


def overlong_mask(mask: Tensor, finished: Tensor) -> Tensor:
    """The mask without sequences that were cut off: they neither learn nor count (DAPO, section 3.4).

    Args:
        mask: bool [sequences, tokens]. finished: bool [sequences], whether a sequence came to its own end.
    """
    return mask & finished[:, None]


def overlong_penalty(lengths: Tensor, most: int, soft: int) -> Tensor:
    """What is added to the rewards of long completions: 0 up to most − soft tokens, then linearly to −1 at `most`
    (DAPO, eq. 13).

    Args:
        lengths: [n], in tokens.

    Raises:
        Refused: soft is not from 1 to most.
    """
    if not 1 <= soft <= most:
        raise Refused(f"soft is {soft}; accepted: from 1 to most, {most}")
    return -((lengths - (most - soft)) / soft).clamp(0, 1)


def kl(logprobs: Tensor, reference: Tensor, kind: str = "k3") -> Tensor:
    """An estimate of KL(π ‖ π_ref) at each token that π sampled, with d = logπ_ref − logπ.

    "k1": −d, unbiased. "k2": d²/2, biased, never negative. "k3": e^d − 1 − d, unbiased and never negative.

    Raises:
        Refused: an unknown kind.
    """
    _one_of("KL", kind, KLS)
    d = reference - logprobs
    return -d if kind == "k1" else d.square() / 2 if kind == "k2" else d.exp() - 1 - d


@dataclass(frozen=True)
class Objective:
    """What is minimized.

    Args:
        low, high: the ratio is clipped to [1 − low, 1 + high]; DAPO's clip-higher is 0.2 and 0.28.
        dual: for A < 0, the ratio counts at most this much (above 1); None: no bound.
        ratio: "token", or "sequence": the geometric mean of a sequence's ratios, for all of its tokens (GSPO).
        mean: "token": over all tokens (DAPO). "sequence": over sequences of their means (GRPO). "constant": the sum
            over a sequence's tokens divided by `length`, averaged over sequences (Dr.GRPO).
        length: for mean="constant", the most tokens that a completion may have.
        kl, kl_coef: the estimate of KL(π ‖ π_ref) and its weight β.

    Raises:
        Refused: a value that is not accepted.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    ratio: str = "token"
    mean: str = "token"
    length: int | None = None
    kl: str = "k3"
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        _one_of("ratio", self.ratio, RATIOS)
        _one_of("mean", self.mean, MEANS)
        _one_of("KL", self.kl, KLS)
        if not 0 <= self.low <= 1 or self.high < 0:
            raise Refused(f"low is {self.low}, high {self.high}; accepted: low from 0 to 1, high from 0")
        if self.dual is not None and self.dual <= 1:
            raise Refused(f"dual is {self.dual}; accepted: above 1, or None")
        if (self.mean == "constant") != (self.length is not None):
            raise Refused(f"mean is {self.mean!r} and length {self.length}; accepted: a length with 'constant' alone")

    def loss(
        self,
        logprobs: Tensor,
        old: Tensor,
        advantage: Tensor,
        mask: Tensor,
        weight: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the share of tokens whose ratio was clipped.

        Args:
            logprobs: [sequences, tokens], of the policy that learns; nothing else carries a gradient.
            old: [sequences, tokens], of the policy before the update.
            advantage: [sequences].
            mask: bool [sequences, tokens]: the tokens that count. A mean is over these; to divide by accepted tokens
                alone, leave the rejected ones out of it (bridge.accepted).
            weight: [sequences, tokens] or [sequences, 1], of each token's policy term; None: 1.
            reference: [sequences, tokens], of a policy to stay near.
        """
        log_ratio, a = logprobs - old, advantage[:, None]
        if self.ratio == "sequence":
            log_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
            log_ratio = log_ratio.expand_as(logprobs)
        rho = log_ratio.exp()
        free, held = rho * a, rho.clamp(1 - self.low, 1 + self.high) * a
        term = torch.minimum(free, held)
        if self.dual is not None:
            term = torch.where(a < 0, torch.maximum(term, self.dual * a), term)
        each = -term if weight is None else -weight * term
        if reference is not None:
            each = each + self.kl_coef * kl(logprobs, reference, self.kl)
        clipped = ((held < free) * mask).sum() / mask.sum()
        return self._mean(each * mask, mask), clipped

    def _mean(self, masked: Tensor, mask: Tensor) -> Tensor:
        if self.mean == "token":
            return masked.sum() / mask.sum()
        if self.length is not None:
            return (masked.sum(1) / self.length).mean()
        counts = mask.sum(1)
        if bool((counts > 0).all()):
            return (masked.sum(1) / counts).mean()
        return (masked.sum(1) / counts.clamp_min(1)).sum() / (counts > 0).sum()  # sequences without tokens do not count


def _one_of(what: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise Refused(f"unknown {what} {value!r}; accepted: {', '.join(accepted)}")
