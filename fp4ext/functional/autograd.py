"""Shared by fp4ext's autograd Functions, which have first derivatives in reverse mode only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

Context = Any  # autograd's ctx, which each Function gives attributes of its own
Gradients = TypeVar("Gradients")


def first_derivative(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorate the backward of an autograd Function that has no second derivative.

    once_differentiable alone raises only where the result is differentiated along a recorded path;
    torch.autograd.functional.hessian, for example, then takes the second derivative for zero.

    Raises:
        NotImplementedError: in a backward with create_graph=True.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Context, *gradients: torch.Tensor) -> Gradients:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "fp4ext's products have first derivatives only; accepted: a backward without create_graph=True"
            )
        return once(ctx, *gradients)

    return checked
