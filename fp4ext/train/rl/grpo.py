"""GRPO on token log-probs, the guards against a sampler that disagrees, and the measures of that disagreement.

    A_i = (R_i − mean of its group) / (standard deviation of its group + 1e-6)
    ρ   = exp(logπ − logπ_old),   L = −w · min(ρ·A, clip(ρ, 1 − ε, 1 + ε)·A) + β·k3(π_ref)
    d   = logπ_old − logπ_rollout,   r = e^d

π_old is the trainer's policy before the update, π_rollout what the sampler drew from. Where both are the same function,
d = 0, r = 1 and every guard w is 1. Arguments are [sequences, tokens] with a mask of the tokens that were sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4ext.errors import Refused

GUARDS = ("none", "token_tis", "sequence_rejection", "icepop")
LEVELS = ("token", "sequence")


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Group-normalised, [n] -> [n]; 0 where a group's rewards are equal."""
    r = rewards.view(-1, group)
    a = (r - r.mean(1, keepdim=True)) / (r.std(1, correction=0, keepdim=True) + 1e-6)
    return a.flatten()


def guard(kind: str, d: Tensor, mask: Tensor) -> Tensor:
    """The weight of each token's loss.

    token_tis: min(r, 2). sequence_rejection: 0 for sequences whose ratio exp(Σd) leaves [1/2, 2]. icepop: r where it
    lies in [1/2, 5], else 0.
    """
    r = d.exp()
    if kind == "none":
        return torch.ones_like(d)
    if kind == "token_tis":
        return r.clamp(max=2.0)
    if kind == "sequence_rejection":
        whole = (d * mask).sum(1, keepdim=True).exp()
        return ((whole >= 0.5) & (whole <= 2.0)).to(d.dtype).expand_as(d)
    if kind == "icepop":
        return torch.where((r >= 0.5) & (r <= 5.0), r, 0.0)
    raise Refused(f"unknown guard {kind!r}; accepted: {', '.join(GUARDS)}")


def loss(
    logprobs: Tensor,
    old: Tensor,
    advantage: Tensor,
    weight: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    level: str = "token",
    reference: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss to minimise, and the share of tokens whose ratio was clipped.

    Args:
        logprobs: under the policy that learns; the others carry no gradient.
        advantage: [sequences].
        level: "token": the mean over all tokens; "sequence": the mean over sequences of their means.
        reference: log-probs of a policy to stay near, by kl_coef · k3.

    Raises:
        Refused: an unknown level.
    """
    if level not in LEVELS:
        raise Refused(f"unknown level {level!r}; accepted: {', '.join(LEVELS)}")
    ratio, a = (logprobs - old).exp(), advantage[:, None]
    free, held = ratio * a, ratio.clamp(1 - clip, 1 + clip) * a
    each = -weight * torch.minimum(free, held)
    if reference is not None:
        d = reference - logprobs
        each = each + kl_coef * (d.exp() - 1 - d)
    clipped = ((held < free) * mask).sum() / mask.sum()
    if level == "token":
        return (each * mask).sum() / mask.sum(), clipped
    return ((each * mask).sum(1) / mask.sum(1)).mean(), clipped


def disagreement(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the trainer's policy is from the one that was sampled, over the sampled tokens, in fp64.

    By verl's names where it has them: kl = mean(−d), k3 = mean(r − 1 − d), chi2 = mean(r²) − 1, and the effective
    sample size as a share, mean(r)² / mean(r²).
    """
    d = (old.double() - rollout.double())[mask]
    r = d.exp()
    return {
        "rollout_corr/kl": (-d).mean().item(),
        "rollout_corr/k3_kl": (r - 1 - d).mean().item(),
        "rollout_corr/chi2_token": (r.square().mean() - 1).item(),
        "rollout_corr/rollout_is_eff_sample_size": (r.mean().square() / r.square().mean()).item(),
        "rollout_corr/mean_abs_d": d.abs().mean().item(),
        "rollout_corr/max_abs_d": d.abs().max().item(),
        "training/rollout_probs_diff_max": (old.double().exp() - rollout.double().exp())[mask].abs().max().item(),
    }


ALARMS = (  # measure, whether it is alarming, in words
    ("rollout_corr/kl", lambda v: abs(v) > 0.1, "|KL| above 0.1"),
    ("rollout_corr/rollout_is_eff_sample_size", lambda v: v < 0.3, "effective sample size below 0.3"),
    ("rollout_corr/chi2_token", lambda v: v > 1, "chi² above 1"),
)


def alarms(measures: dict[str, float]) -> list[str]:
    """What of it is alarming, in words."""
    return [words for name, bad, words in ALARMS if name in measures and bad(measures[name])]
