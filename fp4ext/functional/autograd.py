"""What the autograd Functions here share: first derivatives in reverse mode, and an error where more is asked."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
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
