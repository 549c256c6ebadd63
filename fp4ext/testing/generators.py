"""Inputs that hide nothing: each kind of data that has told two quantizers apart."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = (
    "gaussian",
    "student_t3",
    "outliers30",
    "outliers100",
    "one_hot",
    "integers",
    "wide",
    "tiny",
    "huge",
    "zeros",
    "nonfinite",
)


def generate(kind: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of that kind.

    gaussian, student_t3: N(0, 1) and Student's t with 3 degrees of freedom. outliers30, outliers100: 1/128 of N(0, 1)
    times 30 or 100. one_hot: one nonzero in 64. integers: -6..6, exact in every format. wide: exponents spread over
    2^24. tiny: around 1e-39. huge: around 1e38. zeros: zero blocks of both signs among others. nonfinite: NaN and
    infinities in some blocks.
    """
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=g)
    uniform = lambda: torch.rand(shape, generator=g)  # noqa: E731
    if kind == "gaussian":
        x = normal
    elif kind == "student_t3":
        chi = sum(torch.randn(shape, generator=g) ** 2 for _ in range(3))
        x = normal / (chi / 3).sqrt()
    elif kind in ("outliers30", "outliers100"):
        x = torch.where(uniform() < 1 / 128, normal * float(kind[8:]), normal)
    elif kind == "one_hot":
        x = torch.where(uniform() < 1 / 64, normal.sign(), torch.zeros(()))
    elif kind == "integers":
        x = torch.randint(-6, 7, shape, generator=g).float()
    elif kind == "wide":
        x = normal * torch.exp2(torch.randint(-12, 13, shape, generator=g).float())
    elif kind == "tiny":
        x = normal * 1e-39
    elif kind == "huge":
        x = (normal * 1e38).clamp(-3e38, 3e38)
    elif kind == "zeros":
        zero = torch.where(uniform() < 0.5, torch.tensor(-0.0), torch.tensor(0.0))
        x = torch.where(uniform() < 0.06, normal, zero)
    elif kind == "nonfinite":
        special = torch.tensor([float("nan"), float("inf"), -float("inf")])
        x = torch.where(uniform() < 0.01, special[torch.randint(0, 3, shape, generator=g)], normal)
    else:
        raise ValueError(f"unknown kind {kind!r}; kinds: {', '.join(KINDS)}")
    limit = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.clamp(-limit, limit), x).to(dtype)
