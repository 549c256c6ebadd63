"""A sampler that is not the trainer: how far its log-probs are off, and the weights that correct for it.

    d = logπ_train − logπ_rollout,   r = e^d        π_train: the trainer's policy before the update (π_old)

An engine that samples with other kernels, other quantization or older weights draws from π_rollout, so r is not 1.
Where both are the same function, d = 0 and every weight here is 1.

Sources: truncated importance sampling (TIS): F. Yao et al., "Your efficient RL framework secretly brings you off-policy
RL training" (2025). Masked importance sampling and the band of a token's ratio: IcePop (Ling team, 2025). Sequence
masks: J. Liu et al., "When speed kills stability" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import Refused

LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class Disagreement:
    """Over the sampled tokens, in fp64. Of a ratio r, χ² is mean(r²) − 1, and the effective sample size (ESS) is a
    share, mean(r)²/mean(r²).

    Attributes:
        k1, k3: mean(−d) and mean(r − 1 − d), two estimates of KL(π_rollout ‖ π_train); nats per token.
        mean_abs, max_abs: of |d|, nats. max_probability: the largest |π_train − π_rollout|.
        chi2, ess: of the tokens' ratios. sequence_chi2, sequence_ess: of exp(Σd) of each sequence.
        per_sequence: mean |d| of each sequence, [sequences]. per_expert: of each expert, [experts], NaN for one without
            tokens; None where experts were not given.
    """

    k1: float
    k3: float
    mean_abs: float
    max_abs: float
    max_probability: float
    chi2: float
    ess: float
    sequence_chi2: float
    sequence_ess: float
    per_sequence: Tensor
    per_expert: Tensor | None = None


def disagreement(
    logp_train: Tensor, logp_rollout: Tensor, mask: Tensor, expert: Tensor | None = None, experts: int | None = None
) -> Disagreement:
    """Measure how far a trainer's log-probs are from those that a sampler drew with.

    Args:
        logp_train, logp_rollout: [sequences, tokens], of the sampled tokens.
        mask: bool [sequences, tokens], which of them were sampled.
        expert: int64 [sequences, tokens] or [sequences, tokens, k], the experts that a token chose.
        experts: how many there are; default one more than the largest.

    Raises:
        Refused: shapes that differ, a mask without a token.
    """
    if not logp_train.shape == logp_rollout.shape == mask.shape:
        shapes = f"{tuple(logp_train.shape)}, {tuple(logp_rollout.shape)}, {tuple(mask.shape)}"
        raise Refused(f"log-probs and mask have shapes {shapes}; accepted: one shape [sequences, tokens]")
    if not bool(mask.any()):
        raise Refused("the mask has no token; accepted: at least one sampled token")
    train, rollout = logp_train.double(), logp_rollout.double()
    all_d = torch.where(mask, train - rollout, 0.0)
    d = (train - rollout)[mask]
    r = d.exp()
    whole = all_d.sum(1)[mask.any(1)].exp()
    counts = mask.sum(1)
    per_expert = None
    if expert is not None:
        chosen = (expert if expert.dim() == 3 else expert[..., None])[mask]
        total = experts or int(chosen.max()) + 1
        flat = chosen.flatten()
        sums = torch.zeros(total, dtype=torch.float64, device=d.device)
        sums.index_add_(0, flat, d.abs()[:, None].expand(-1, chosen.shape[1]).flatten())
        per_expert = sums / torch.bincount(flat, minlength=total)
    return Disagreement(
        k1=(-d).mean().item(),
        k3=(r - 1 - d).mean().item(),
        mean_abs=d.abs().mean().item(),
        max_abs=d.abs().max().item(),
        max_probability=(train.exp() - rollout.exp())[mask].abs().max().item(),
        chi2=_chi2(r),
        ess=_ess(r),
        sequence_chi2=_chi2(whole),
        sequence_ess=_ess(whole),
        per_sequence=all_d.abs().sum(1) / counts,
        per_expert=per_expert,
    )


def _chi2(r: Tensor) -> float:
    return (r.square().mean() - 1).item()


def _ess(r: Tensor) -> float:
    return (r.mean().square() / r.square().mean()).item()


# What guard alarms at, as (attribute of Disagreement, the largest or smallest value that is not alarming).
MOST = {"k1": 0.1, "chi2": 1.0}
LEAST = {"ess": 0.3}


def guard(measured: Disagreement, most: Mapping[str, float] = MOST, least: Mapping[str, float] = LEAST) -> list[str]:
    """What of it is alarming, in words; empty where nothing is.

    Args:
        most, least: by the name of a measure, the largest |value| and the smallest value that pass.

    Raises:
        Refused: a name that is no measure.
    """
    numbers = {name: value for name, value in vars(measured).items() if isinstance(value, float)}
    if unknown := [name for name in (*most, *least) if name not in numbers]:
        raise Refused(f"unknown measure {unknown[0]!r}; accepted: {', '.join(numbers)}")
    said = [f"|{name}| is {abs(numbers[name]):.3g}, above {m}" for name, m in most.items() if abs(numbers[name]) > m]
    return said + [f"{name} is {numbers[name]:.3g}, below {m}" for name, m in least.items() if numbers[name] < m]


def ratio(d: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """r of each token, [sequences, tokens] at level "token"; of each sequence, [sequences, 1]: exp(Σd) at "sequence",
    exp(mean of d) at "geometric".

    Raises:
        Refused: an unknown level.
    """
    if level not in LEVELS:
        raise Refused(f"unknown level {level!r}; accepted: {', '.join(LEVELS)}")
    if level == "token":
        return d.exp()
    total = (d * mask).sum(1, keepdim=True)
    return (total if level == "sequence" else total / mask.sum(1, keepdim=True).clamp_min(1)).exp()


def truncated(d: Tensor, mask: Tensor, cap: float = 2.0, level: str = "token") -> Tensor:
    """TIS: min(r, cap)."""
    return ratio(d, mask, level).clamp(max=cap)


def masked(d: Tensor, mask: Tensor, low: float = 0.5, high: float = 5.0, level: str = "token") -> Tensor:
    """MIS: r where it lies in [low, high], else 0 (IcePop at level "token")."""
    r = ratio(d, mask, level)
    return torch.where((r >= low) & (r <= high), r, 0.0)


def accepted(d: Tensor, mask: Tensor, low: float = 0.5, high: float = 2.0, level: str = "sequence") -> Tensor:
    """The mask of tokens whose ratio lies in [low, high]: rejection, which divides by the accepted where the loss takes
    this for its mask.

    At level "token" it is a trust band around the sampler; at the other levels a sequence stays or goes whole.
    """
    r = ratio(d, mask, level)
    return mask & ((r >= low) & (r <= high))
