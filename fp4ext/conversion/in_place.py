"""convert: make a model's linear layers quantize by a policy, in place, and say what was done and what was left.

What is converted is decided in decision.py. A converted layer is the same object with the same parameters and hooks;
only its class changes, from nn.Linear to fp4ext.Linear; so do the stacked experts of transformers' models
(nn/transformers_experts.py). So optimizers, state_dicts and sharding don't notice, and `revert` has nothing to copy.
fp4ext.Experts has no plain class: its policy changes, and under the policy bf16 it is plain.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from ..nn import transformers_experts
from ..nn.by_policy import ByPolicy, forget_policy
from ..nn.dense import Linear
from ..nn.experts import Experts
from ..policy import policies
from ..policy.policy import Policy
from ..policy.stages import check_stage
from . import names
from .decision import Filter, decide
from .wrapped import class_of, set_class

CONVERTED = (Linear, Experts, transformers_experts.Stacked)


@dataclass(frozen=True)
class Report:
    """What convert did. Names are those of the model's author, without wrappers ("_orig_mod.", DDP's "module.").

    Attributes:
        policy: the policy's name.
        converted: names of the modules that quantize now.
        left: names of the modules with matrices that stay as they are → why.
    """

    policy: str
    converted: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"policy {self.policy}: {len(self.converted)} layers converted, {len(self.left)} left"]
        lines += [f"  left {name or '(the model itself)'}: {why}" for name, why in self.left.items()]
        return "\n".join(lines)


def convert(model: nn.Module, policy: Policy | str = "end_to_end", filter: Filter | None = None) -> Report:
    """Make each nn.Linear and all experts of a model quantize by a policy, in place.

    Experts are fp4ext.Experts, or those of a model of transformers (5.24 or later) in stacked weights.

    Args:
        model: any module; the parameters stay the same objects.
        policy: a Policy or the name of one. Modules that it keeps (by name, or as the last blocks) are left.
        filter: called with the name and module of each; False leaves it.

    Returns:
        A Report. A model that is already converted is converted anew.

    Raises:
        ValueError: an unknown policy. TypeError: model is not a module. Whatever is raised, the model is as it was.

    Warns:
        UserWarning: the policy quantizes something, and no layer of the model can be converted.
    """
    _check_module(model)
    policy = policies.get(policy)
    decision = decide(model, policy, filter)
    modules = dict(names.named_modules(model))
    report = Report(policy.name, decision.chosen, decision.left)
    with restored(modules.values(), only_after_an_error=True):
        for name in decision.left:
            _revert(modules[name])
        for name in decision.chosen:
            _convert(modules[name], policy, name)
    for name, module in modules.items():
        if isinstance(module, nn.TransformerEncoderLayer) and Linear in map(type, module.children()):
            report.left[name] = (
                "its fast path, which torch takes in eval without gradients, does not call the layers inside; "
                "torch.backends.mha.set_fastpath_enabled(False) closes it"
            )
    if not report.converted and policy.quantizes:
        warnings.warn(nothing_converted(report), stacklevel=2)
    return report


def nothing_converted(report: Report) -> str:
    """Says that a policy took no layer of a model, and the reasons, the most frequent first."""
    reasons: dict[str, list[str]] = {}
    for name, why in report.left.items():
        reasons.setdefault(why, []).append(name or "(the model itself)")
    most = sorted(reasons.items(), key=lambda item: -len(item[1]))[:3]
    said = "; ".join(f"{len(found)} of them ({found[0]}, …): {why}" for why, found in most)
    return f"policy {report.policy} converts no layer of this model; {said or 'it has no module with matrices'}"


@contextmanager
def restored(modules: Iterable[nn.Module], only_after_an_error: bool = False) -> Iterator[None]:
    """Modules whose classes and attributes are afterwards what they were; or only if what is done inside raises."""
    before = [(m, m.__class__, dict(m.__dict__)) for m in modules]
    done = False
    try:
        yield
        done = True
    finally:
        for module, kind, attributes in () if done and only_after_an_error else before:
            module.__class__ = kind
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)


def revert(model: nn.Module) -> list[str]:
    """Make each converted layer what it was (fp4ext.Experts: plain) again, in place; the names of those that were."""
    _check_module(model)
    return [name for name, module in names.named_modules(model) if _revert(module)]


def set_step(model: nn.Module, step: int) -> None:
    """Tell every converted layer how far training is, for policies that change with it."""
    _check_module(model)
    for module in model.modules():
        if isinstance(module, CONVERTED):
            module.set_step(step)


def storage_bits(model: nn.Module, stage: str = "pretrain") -> dict[str, float]:
    """Stored bits an element of the `weights` that fprop reads and of the `saved_activations` that wgrad reads.

    Over all converted layers, weighted by their weights and inputs; 16 where none is. Raises ValueError for an unknown
    stage.
    """
    _check_module(model)
    check_stage(stage)
    weights = activations = weight_bits = activation_bits = 0.0
    for module in model.modules():
        if isinstance(module, CONVERTED):
            recipe = module.recipes[stage]
            for w in module.parameters(recurse=False):
                if w.dim() < (2 if isinstance(module, Linear) else 3):
                    continue
                width = w.shape[-2 if getattr(module, "is_transposed", False) else -1]
                weights += w.numel()
                activations += width
                weight_bits += w.numel() * recipe.weight_bits
                activation_bits += width * recipe.saved_activation_bits
    if not weights:
        return {"weights": 16.0, "saved_activations": 16.0}
    return {"weights": weight_bits / weights, "saved_activations": activation_bits / activations}


def _check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; accepted: a torch.nn.Module")


def _convert(module: nn.Module, policy: Policy, name: str) -> None:
    if transformers_experts.is_stacked(module):
        transformers_experts.swap(module)
    elif not isinstance(module, Experts):
        set_class(module, Linear)
    assert isinstance(module, ByPolicy)
    module.set_policy(policy, name)


def _revert(module: nn.Module) -> bool:
    if isinstance(module, Experts) and class_of(module) is Experts and module.policy.name != "bf16":
        module.set_policy("bf16")
        return True
    if isinstance(module, transformers_experts.Stacked):
        transformers_experts.restore(module)
        return True
    if class_of(module) is not Linear:
        return False
    set_class(module, nn.Linear)
    forget_policy(module)
    return True
