"""The experts of transformers' models, quantized by a policy where they stand.

Since transformers 5 a model's routed experts are one module with stacked weights, made by one decorator. What it
records says how the module computes, for any architecture:

    forward(x [T, K], top_k_index [T, k], top_k_weights [T, k]) -> [T, K]
    has_gate           gate_up_proj and `_apply_gate`; else up_proj and `act_fn`;   then down_proj
    is_transposed      weights [E, K, N] instead of [E, N, K]
    has_bias           a bias [E, N] beside each weight
    has_post_expert_norm   `post_expert_norm` on each expert's output

Here the rows are sorted by expert, and the two products are grouped linear layers (experts.py). Activations, biases and
norms stay the model's own. A token's outputs are added in fp32, weighted, from its first choice to its last.

The module stays the same object; its class becomes one derived from its own. transformers is not imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, SupportsIndex, cast

from torch import Tensor, nn

from ..functional.grouped import expert_ends
from .by_policy import ByPolicy, forget_policy
from .experts import StacksByPolicy

RECORDED = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "num_experts")


class Stacked(StacksByPolicy):
    """What is mixed into a class of experts of transformers. Only `convert` and `revert` change classes.

    Attributes:
        num_experts, is_transposed, has_gate, has_bias, has_post_expert_norm, act_fn, post_expert_norm, _apply_gate:
            those of the model's own class.
    """

    MIXED: type[Stacked]
    num_experts: int
    is_transposed: bool
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        (tokens, top_k), x = top_k_index.shape, hidden_states
        chosen, order = top_k_index.flatten().sort(stable=True)
        offsets = expert_ends(chosen, self.num_experts)
        # Expanded and permuted, not gathered: the backward then has no sum whose order is open.
        rows = x[:, None].expand(-1, top_k, -1).flatten(0, 1)[order]
        up, down = self.stacks
        h = self._biased(self.product(rows, up, offsets), up, chosen)
        y = self.product(self._apply_gate(h) if self.has_gate else self.act_fn(h), down, offsets)
        y = self._biased(y, down, chosen)
        if self.has_post_expert_norm:
            y = self.post_expert_norm(y)
        y = y[order.argsort()].view(tokens, top_k, -1).float() * top_k_weights.float()[..., None]
        total: Tensor
        total, *rest = y.unbind(1)
        for part in rest:
            total = total + part
        return total.to(x.dtype)

    @property
    def stacks(self) -> tuple[str, str]:
        return names_of_stacks(self)

    def stack(self, name: str) -> Tensor:
        return stack_of(self, name)

    def _biased(self, y: Tensor, name: str, chosen: Tensor) -> Tensor:
        return y + getattr(self, f"{name}_bias").index_select(0, chosen) if self.has_bias else y

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"policy={self.policy.name}")))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Copies and pickles: the class is made anew from the model's own."""
        return _empty, (self.MIXED, plain_class(self)), self.__dict__


def is_stacked(module: nn.Module) -> bool:
    """Whether these are experts made by transformers' decorator, converted or not."""
    return all(hasattr(module, name) for name in RECORDED) and any(p.dim() == 3 for p in _own(module))


def why_not(module: nn.Module) -> str | None:
    """Why stacked experts cannot be converted; None: they can."""
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over processes"
    names = [*names_of_stacks(module)]
    if module.has_bias:
        names += [f"{name}_bias" for name in names]
    own = dict(module.named_parameters(recurse=False))
    missing = [name for name in names if name not in own]
    if missing:
        return f"{type(module).__name__} has no {', '.join(missing)}"
    return None


def names_of_stacks(module: nn.Module) -> tuple[str, str]:
    """What transformers' experts, converted or not, call their two stacks."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def stack_of(module: nn.Module, name: str) -> Tensor:
    """A stack of transformers' experts, converted or not, as [E, N, K]."""
    w = module.get_parameter(name)
    return w.mT if module.is_transposed else w


def swap(module: nn.Module) -> None:
    """Give stacked experts the class that quantizes. Their policy is set next."""
    if not isinstance(module, Stacked):
        module.__class__ = mixed(Stacked, type(module))


def restore(module: nn.Module) -> None:
    """Give them back their own class."""
    module.__class__ = plain_class(module)
    forget_policy(module)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of the model's own."""
    return next(kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and not issubclass(kind, ByPolicy))


def mixed(mixin: type[Stacked], plain: type[nn.Module]) -> type[Stacked]:
    """The class of a model's own experts with the mixin before it."""
    return _mixed(cast(Hashable, mixin), cast(Hashable, plain))


@functools.cache
def _mixed(mixin: type[Stacked], plain: type[nn.Module]) -> type[Stacked]:
    more = {"__module__": plain.__module__, "__doc__": mixin.__doc__, "MIXED": mixin}
    return type(plain.__name__, (mixin, plain), more)


def _empty(mixin: type[Stacked], plain: type[nn.Module]) -> nn.Module:
    made = mixed(mixin, plain)
    return made.__new__(made)


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))
