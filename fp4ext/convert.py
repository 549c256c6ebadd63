"""convert: make a model's linear layers quantize by a policy, in place, and say what was done and what was left.

A converted layer is the same object with the same parameters and hooks; only its class changes, from nn.Linear to
fp4ext.Linear; so do the stacked experts of transformers' models (stacked.py). So optimizers, state_dicts and sharding
don't notice, and `revert` has nothing to copy. fp4ext.Experts has no plain class: its policy changes, and under the
policy bf16 it is plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from . import policies, stacked
from .experts import Experts
from .linear import Linear
from .policy import Policy
from .stages import check_stage

Filter = Callable[[str, nn.Module], bool]
CONVERTED = (Linear, Experts, stacked.Stacked)


@dataclass(frozen=True)
class Report:
    """What convert did.

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
        policy: a Policy or the name of one. Modules that it keeps (by name, or as the last layers) are left.
        filter: called with the name and module of each; False leaves it.

    Returns:
        A Report. A model that is already converted is converted anew.

    Raises:
        ValueError: an unknown policy. TypeError: model is not a module.
    """
    _check_module(model)
    policy = policies.get(policy)
    report = Report(policy.name)
    candidates: list[str] = []
    modules = dict(model.named_modules())
    shared = _shared_weights(model)
    for name, module in modules.items():
        why = _why_left(name, module, policy, filter, shared)
        if why:
            report.left[name] = why
        elif type(module) in (nn.Linear, Linear, Experts) or stacked.is_stacked(module):
            candidates.append(name)
    kept = round(len(candidates) * policy.keep_last)
    for name in candidates[len(candidates) - kept :]:
        report.left[name] = f"among the last {policy.keep_last:.0%} of layers, which the policy keeps in BF16"
    for name in report.left:
        _revert(modules[name])
    for name in candidates[: len(candidates) - kept]:
        if stacked.is_stacked(modules[name]):
            stacked.swap(modules[name])
        elif not isinstance(modules[name], Experts):
            modules[name].__class__ = Linear
        modules[name].set_policy(policy, name)
        report.converted.append(name)
    for name, module in modules.items():
        if isinstance(module, nn.TransformerEncoderLayer) and Linear in map(type, module.children()):
            report.left[name] = (
                "its fast path, which torch takes in eval without gradients, does not call the layers inside; "
                "torch.backends.mha.set_fastpath_enabled(False) closes it"
            )
    return report


def revert(model: nn.Module) -> list[str]:
    """Make each converted layer what it was (fp4ext.Experts: plain) again, in place; the names of those that were."""
    _check_module(model)
    return [name for name, module in model.named_modules() if _revert(module)]


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


def _why_left(
    name: str, module: nn.Module, policy: Policy, filter: Filter | None, shared: dict[int, list[str]]
) -> str | None:
    """Why a module with matrices stays as it is.

    None for one that can be converted, or that has no matrices of its own.
    """
    parameters = list(module.parameters(recurse=False))
    kind = type(module).__name__
    if any(map(nn.parameter.is_lazy, parameters)):
        return f"{kind} has no shape yet: run a batch through the model first"
    if not isinstance(module, nn.Linear) and not any(p.dim() >= 2 for p in parameters):
        return None
    if stacked.is_stacked(module):
        if why := stacked.why_not(module):
            return why
    elif type(module) not in (nn.Linear, Linear, Experts):
        for base, called in ((nn.Linear, "nn.Linear"), (Experts, "fp4ext.Experts")):
            if isinstance(module, base):
                return f"{kind} is a subclass of {called}, and may compute something else"
        if hasattr(module, "num_experts") and any(p.dim() == 3 for p in parameters):
            return f"{kind} has stacked weights, but does not say as transformers' experts do how it computes"
        return f"{kind} has no 4-bit form here"
    matrices = [p for p in parameters if p.dim() >= 2]
    for w in matrices:
        if w.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"its weight is {w.dtype}; accepted: float32, bfloat16, float16"
    if "forward" in vars(module):
        return "its forward is replaced on the object, and would be called instead"
    others = [other for w in matrices for other in shared.get(id(w), []) if other != name]
    if others:
        return f"it shares its weight with {', '.join(others)}"
    if policy.keeps(name):
        return "the policy keeps modules of this name in BF16"
    if filter is not None and not filter(name, module):
        return "the filter refused it"
    return None


def _shared_weights(model: nn.Module) -> dict[int, list[str]]:
    """For each parameter, the modules that own it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(id(p), []).append(name)
    return owners


def _revert(module: nn.Module) -> bool:
    if type(module) is Experts and module.policy.name != "bf16":
        module.set_policy("bf16")
        return True
    if isinstance(module, stacked.Stacked):
        stacked.restore(module)
        return True
    if type(module) is not Linear:
        return False
    module.__class__ = nn.Linear
    for attribute in ("policy", "policy_name", "recipes"):
        module.__dict__.pop(attribute, None)
    return True
