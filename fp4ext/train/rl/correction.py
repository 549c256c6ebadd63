"""How an arm corrects for a sampler that is not the trainer, and the names of the measures in metrics.jsonl."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4ext.errors import Refused
from fp4ext.rl import bridge

GUARDS = ("none", "token_tis", "sequence_rejection", "icepop")

# verl's names, where it has the measure.
NAMES = {
    "k1": "rollout_corr/kl",
    "k3": "rollout_corr/k3_kl",
    "chi2": "rollout_corr/chi2_token",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
    "mean_abs": "rollout_corr/mean_abs_d",
    "max_abs": "rollout_corr/max_abs_d",
    "max_probability": "training/rollout_probs_diff_max",
}


def weight(guard: str, d: Tensor, mask: Tensor) -> Tensor:
    """The weight of each token's loss, [sequences, tokens].

    token_tis: min(r, 2). sequence_rejection: 0 for sequences whose ratio exp(Σd) leaves [1/2, 2]. icepop: r where it
    lies in [1/2, 5], else 0.
    """
    if guard == "none":
        return torch.ones_like(d)
    if guard == "token_tis":
        return bridge.truncated(d, mask)
    if guard == "sequence_rejection":
        return bridge.accepted(d, mask).to(d.dtype)
    if guard == "icepop":
        return bridge.masked(d, mask)
    raise Refused(f"unknown guard {guard!r}; accepted: {', '.join(GUARDS)}")


def measures(measured: bridge.Disagreement) -> dict[str, float]:
    """As a line of metrics.jsonl has them."""
    return {said: getattr(measured, name) for name, said in NAMES.items()}
