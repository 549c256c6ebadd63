"""What the autograd Functions here share: first derivatives in reverse mode, and an error where more is asked."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable


def first_derivative(backward: Callable) -> Callable:
    """Decorate the backward of an autograd Function that has no second derivative.

    once_differentiable alone says so only where the result is differentiated along a recorded path;
    torch.autograd.functional.hessian, for one, then takes the second derivative for zero.

    Raises:
        NotImplementedError: in a backward with create_graph=True.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "fp4ext's products have first derivatives only; accepted: a backward without create_graph=True"
            )
        return once(ctx, *gradients)

    return checked


def refuse_transforms(what: str, *tensors: Tensor | None) -> None:
    """Raises NotImplementedError for inputs with a forward-mode tangent, and inside torch.func or torch.jit.trace."""
    if torch.compiler.is_compiling():
        return
    if torch.jit.is_tracing():
        raise NotImplementedError(f"{what} cannot be traced by torch.jit; accepted: torch.compile, torch.export")
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{what} has no rule for torch.func's transforms (vmap, grad, jvp, jacrev, …); "
            "accepted: torch.autograd, torch.compile"
        )
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    ):
        raise NotImplementedError(f"{what} has no forward-mode derivative; accepted: torch.autograd in reverse mode")
