"""decide: which modules of a model are quantized by a policy, and why each of the others is not.

This is the one place where that is decided. convert and pack follow it, export.save asks it for the model behind a
checkpoint, and the audit and the cost model count by it; so what is trained in 4 bits is what is exported in 4 bits.

A module is left, for the first reason that holds, where

- it is no nn.Linear, fp4ext.Experts or experts of transformers, or is a subclass that may compute something else;
- its weight is not a parameter of its own that its own forward reads: tied, computed by a hook (weight_norm,
  spectral_norm), or read by the parent without a call (uncalled.py);
- the policy keeps it: by its name, as the head of its model or a part of a router, in the last blocks (keep_last), or
  because its recipe quantizes nothing in any stage;
- the caller's filter refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, dtype, float16, float32, nn
from torch import bfloat16 as bf16

from ..nn import transformers_experts
from ..nn.dense import Linear
from ..nn.experts import Experts
from ..policy.policy import Policy
from . import names, uncalled
from .wrapped import class_of

Filter = Callable[[str, nn.Module], bool]
ACCEPTED: tuple[dtype, ...] = (float32, bf16, float16)
# What transformers calls the classes of its routers.
ROUTERS = ("Router", "TopKGating", "MoEGate", "MoeGate", "MoEV1Gate")
LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True)
class Decision:
    """What becomes of a model's modules under a policy. Names are without wrappers (names.py), in the model's order.

    Attributes:
        policy: the policy.
        chosen: modules that quantize.
        left: modules with matrices that stay as they are → why.
    """

    policy: Policy
    chosen: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def decide(model: nn.Module, policy: Policy, filter: Filter | None = None) -> Decision:
    """The decision for a model, plain or converted; nothing is changed.

    Args:
        model: any module; parameters may be on the meta device.
        filter: called with the name and module of each that would be quantized; False leaves it. It decides before
            keep_last does.
    """
    modules = dict(names.named_modules(model))
    facts = _Facts(modules)
    left: dict[str, str] = {}
    able: list[str] = []
    for name, module in modules.items():
        if not _has_matrices(module):
            continue
        why = _unable(module) or facts.why_not(name, module) or _unwanted(name, facts.aliases(name), policy)
        if why is None and filter is not None and not filter(name, module):
            why = "the filter refused it"
        if why is None:
            able.append(name)
        else:
            left[name] = why
    return _but_for_the_last(policy, able, left, modules)


def by_names_alone(modules: list[str], policy: Policy) -> Decision:
    """The decision for linear layers of which nothing is known but their names, in order: what a policy says of them.

    It leaves what `decide` leaves by name, and where modules are missing that a class would show, no more than that.
    """
    left = {name: why for name in modules if (why := _unwanted(name, (), policy) or _adapter(name))}
    return _but_for_the_last(policy, [name for name in modules if name not in left], left, modules)


def _but_for_the_last(policy: Policy, able: list[str], left: dict[str, str], order: Iterable[str]) -> Decision:
    """The decision once the last blocks are left too. order: the names of all modules in the model's order."""
    last = names.in_last_blocks(able, policy.keep_last)
    why = f"in the last {policy.keep_last:.0%} of blocks, which the policy keeps in BF16"
    left = left | dict.fromkeys(last, why)
    return Decision(policy, [name for name in able if name not in left], {n: left[n] for n in order if n in left})


def _unwanted(name: str, aliases: tuple[str, ...], policy: Policy) -> str | None:
    """Why a policy keeps a module, None where it does not."""
    if policy.keeps(name):
        return "the policy keeps modules of this name in BF16"
    for alias, what in zip(aliases, map(ALIASES.get, aliases), strict=True):
        if policy.keeps(alias):
            return f"{what}, which the policy keeps in BF16 ({alias})"
    if not any(recipe.quantizes for recipe in policy.recipes(name).values()):
        return f"policy {policy.name} quantizes nothing in modules of this name"
    return None


# A module that its class shows to be one of these is kept by a policy that keeps modules of this name.
ALIASES = {"lm_head": "it is a head of the model", "router": "it is a part of a router"}


def _has_matrices(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return isinstance(module, nn.Linear) or any(map(nn.parameter.is_lazy, own)) or any(p.dim() >= 2 for p in own)


def _unable(module: nn.Module) -> str | None:
    """Why a module by itself can't be quantized, None where it can."""
    own, kind = dict(module.named_parameters(recurse=False)), class_of(module).__name__
    if any(map(nn.parameter.is_lazy, own.values())):
        return f"{kind} has no shape yet: run a batch through the model first"
    if transformers_experts.is_stacked(module):
        if why := transformers_experts.why_not(module):
            return why
    elif class_of(module) not in (nn.Linear, Linear, Experts):
        for base, called in ((nn.Linear, "nn.Linear"), (Experts, "fp4ext.Experts")):
            if isinstance(module, base):
                return f"{kind} is a subclass of {called}, and may compute something else"
        if hasattr(module, "num_experts") and any(p.dim() == 3 for p in own.values()):
            return f"{kind} has stacked weights, but does not say as transformers' experts do how it computes"
        return f"{kind} has no 4-bit form here"
    elif isinstance(module, nn.Linear) and "weight" not in own:
        made = ", ".join(sorted(own.keys() - {"bias"})) or "other tensors"
        return f"its weight is computed from {made} before each call (weight_norm, spectral_norm, pruning)"
    for w in own.values():
        if w.dim() >= 2 and w.dtype not in ACCEPTED:
            return f"its weight is {w.dtype}; accepted: float32, bfloat16, float16"
    if "forward" in vars(module):
        return "its forward is replaced on the object, and would be called instead"
    return None


def _adapter(name: str) -> str | None:
    if any(part in LORA for part in name.split(".")):
        return "it is a LoRA adapter, which stays in the precision that it is trained in"
    return None


class _Facts:
    """What the model around a module says of it."""

    def __init__(self, modules: dict[str, nn.Module]):
        self.owners: dict[int, list[str]] = {}
        self.uncalled: dict[str, str] = {}
        self.heads: set[str] = set()
        self.routers: set[str] = set()
        for name, module in modules.items():
            dot = f"{name}." if name else ""
            for p in module.parameters(recurse=False):
                self.owners.setdefault(id(p), []).append(name)
            if module._modules:
                kind = type(module).__name__
                self.uncalled |= {f"{dot}{n}": kind for n in uncalled.read_without_call(type(module))}
                if any(word in kind for word in ROUTERS):
                    self.routers.add(name)
            self.heads |= _heads(name, module, modules)

    def why_not(self, name: str, module: nn.Module) -> str | None:
        if why := _adapter(name):
            return why
        matrices: list[Tensor] = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
        others = [other for w in matrices for other in self.owners[id(w)] if other != name]
        if others:
            return f"it shares its weight with {', '.join(others)}"
        if name in self.uncalled:
            return f"{self.uncalled[name]} reads its weight without calling it"
        return None

    def aliases(self, name: str) -> tuple[str, ...]:
        """The ALIASES that hold of a module."""
        router = any(name == r or name.startswith(f"{r}.") for r in self.routers)
        head = any(name == h or name.startswith(f"{h}.") for h in self.heads)
        return ("router",) * router + ("lm_head",) * head


def _heads(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> set[str]:
    """The heads that a class of transformers shows: its output embeddings, and all that stands beside its base model.

    For the outermost model only does what stands beside the base model count: parts of a larger one may be anything.
    """
    base, output_of = getattr(module, "base_model_prefix", None), getattr(module, "get_output_embeddings", None)
    if not isinstance(base, str) or output_of is None:
        return set()
    dot = f"{name}." if name else ""
    try:
        output = output_of()
    except (AttributeError, NotImplementedError, TypeError):
        output = None
    found = {n for n, m in modules.items() if m is output} if isinstance(output, nn.Module) else set()
    if not name and isinstance(module._modules.get(base), nn.Module):
        found |= {f"{dot}{child}" for child in module._modules if child != base}
    return found
