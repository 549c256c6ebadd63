"""Which weights of a source are quantized, and how: the decision of decision.py, carried over to a checkpoint's names.

A converted or packed model has decided already, and a plain one decides now. Of a checkpoint's files the model is built
on the meta device, by the class that config.json names, where transformers has it; otherwise names alone tell, by
the rules of naming.py and of the policy, and the report says that it was so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..conversion import described
from ..conversion.decision import by_names_alone, decide
from ..conversion.in_place import CONVERTED
from ..conversion.names import named_modules
from ..nn.experts import Experts
from ..nn.transformers_experts import is_stacked, names_of_stacks
from ..policy import formats, policies, policy_file
from ..policy.formats import Format
from ..policy.policy import Policy
from ..policy.recipe import Fprop, Recipe
from ..policy.spec import Spec, as_spec
from . import module, naming, origin
from .errors import Invalid
from .layout import Layout
from .source import Source

SMALL = 1024  # elements: below, scales and names cost more than codes save. Only where names alone tell
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Chosen:
    """What is quantized of a source.

    Attributes:
        specs: weight → how it is quantized.
        left: the other plain weights of two and more dimensions → why they stay plain.
        by: what decided: the model itself, a class of transformers, or names alone and why.
        spec_of: the Spec of a weight that is quantized anew, whatever its format was; None where the policy keeps it.
        policy: the one policy of all, None where there are several, or a bare Spec.
        linear: names of linear modules that stay plain, which readers must be told of, in the checkpoint or not.
        stacked: the weights that are rows of a stack of experts in the model, and share an outer scale from the start.
    """

    specs: dict[str, Spec] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    by: str = ""
    spec_of: Callable[[str], Spec | None] = lambda name: None
    policy: Policy | None = None
    linear: list[str] = field(default_factory=list)
    stacked: set[str] = field(default_factory=set)


def choose(src: Source, policy: Policy | Spec | Format | str | None, layout: Layout) -> Chosen:
    """The choice for a source.

    Raises:
        Refused: a policy that there is not, that quantizes nothing, or at random.
    """
    given = policy_of(policy, layout)
    used = given or policies.get("end_to_end")
    plain = [n for n in src.names() if src.format(n) is None and n not in src.fp8]
    model, by = src.model, "the modules of the model"
    if model is None and plain:
        model, by = described.by_class(src.config, len(src.names()))
    made = Chosen(by=by, policy=None if isinstance(policy, (Spec, Format)) or _is_key(policy) else used)
    made.spec_of = lambda name: used.recipe("rl_sampler", naming.module(name)).fprop.w
    known = {} if model is None else _owners(model, src, plain)
    if model is None or not known:
        made.by = f"names alone, for {by if model is None else f'{by} has none of these names'}"
        _by_names(made, src, plain, used, layout)
        return made
    decided = given is None and _is_converted(model)
    specs, why = _converted(model) if decided else _decided(model, used)
    if decided:
        of = {p for m in model.modules() if isinstance(m, CONVERTED) and isinstance(p := m.policy, Policy)}
        made.policy = of.pop() if len(of) == 1 else None
        made.spec_of = lambda name: specs.get(known.get(name, [("", "")])[0][0], used.recipe("rl_sampler", "").fprop.w)
    modules = dict(named_modules(model))
    for name in plain:
        _one(made, name, src, known.get(name, []), specs, why, modules, by)
    made.linear = [n for n, m in modules.items() if isinstance(m, nn.Linear) and n not in specs]
    return made


def policy_of(policy: Policy | Spec | Format | str | None, layout: Layout) -> Policy | None:
    """What a caller's `policy` means, None where the model's own counts. Raises Refused."""
    if policy is None and layout.formats == (formats.MXFP4,):
        policy = "mxfp4"
    if isinstance(policy, Format) or (isinstance(policy, str) and _is_key(policy)):
        try:
            policy = as_spec(policy)
        except ValueError as error:
            known = ", ".join(policies.names())
            raise Invalid(
                f"unknown policy {policy!r}; policies: {known}; or a .toml file, or a spec ({error})"
            ) from None
    if isinstance(policy, Spec):
        if policy.needs_rng:
            raise Invalid(f"policy {policy}: weights are stored once; accepted: rounding nearest, rht none")
        weights = Recipe(Fprop(None, policy))
        return Policy(str(policy), weights, weights)
    if policy is None:
        return None
    policy = policies.get(policy)
    if policy.pretrain.fprop.w is None and policy.rl_sampler is None and not policy.rules:
        raise Invalid(f"policy {policy.name} quantizes no weight; accepted: one that does")
    return policy


def _is_key(policy: object) -> bool:
    """Whether it is a text that is the name of no policy, and so may be a Spec's key."""
    return isinstance(policy, str) and policy not in policies.names() and not policy.endswith(policy_file.SUFFIXES)


def _is_converted(model: nn.Module) -> bool:
    return any(isinstance(m, (*CONVERTED, *module.PACKED)) for m in model.modules())


def _decided(model: nn.Module, policy: Policy) -> tuple[dict[str, Spec], dict[str, str]]:
    """(module → Spec, module left → why) of a plain model under a policy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decision = decide(model, policy)
    specs = {name: policy.recipe("rl_sampler", name).fprop.w for name in decision.chosen}
    bare = {name: "the sampler of its policy does not quantize it" for name, spec in specs.items() if spec is None}
    return {name: spec for name, spec in specs.items() if spec is not None}, decision.left | bare


def _converted(model: nn.Module) -> tuple[dict[str, Spec], dict[str, str]]:
    """The same of a model that was converted: its layers say."""
    specs: dict[str, Spec] = {}
    why: dict[str, str] = {}
    for name, m in named_modules(model):
        if isinstance(m, CONVERTED) and not isinstance(m, module.PACKED):
            layer: Any = m  # all classes of CONVERTED have `recipes`, and not all declare them
            spec = layer.recipes["rl_sampler"].fprop.w
            if spec is None:
                why[name] = "the sampler of its policy does not quantize it"
            else:
                specs[name] = spec
        elif isinstance(m, nn.Linear) or is_stacked(m):
            why[name] = "the model was converted, and this was left"
    return specs, why


def _owners(model: nn.Module, src: Source, plain: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Weight → (module, parameter) of the parameters that hold its rows."""
    state = {name: tuple(w.shape) for name, w in module.weights_of(model).items()}
    shapes = {name: src.shape(name) for name in src.names()}
    owners: dict[str, list[tuple[str, str]]] = {}
    for parameter, parts in origin.of_parameters(model, state, shapes).items():
        owner, _, leaf = parameter.rpartition(".")
        for name in dict.fromkeys(part.name for part in parts):
            owners.setdefault(name, []).append((owner, leaf))
    return {name: owners[name] for name in plain if name in owners}


def _one(
    made: Chosen,
    name: str,
    src: Source,
    owners: list[tuple[str, str]],
    specs: dict[str, Spec],
    why: dict[str, str],
    modules: dict[str, nn.Module],
    by: str,
) -> None:
    """What becomes of one weight whose parameters are known."""
    if len(src.shape(name)) < 2:
        return
    if not owners:
        made.left[name] = f"{by}: it has no such parameter"
        return
    found = {specs.get(owner) if _is_matrix(modules[owner], leaf) else None for owner, leaf in owners}
    owner, leaf = owners[0]
    if len(found) > 1:
        made.left[name] = f"{owner} and others share it, and are not quantized alike"
    elif (spec := found.pop()) is not None:
        made.specs[name] = spec
        if not isinstance(modules[owner], nn.Linear):
            made.stacked.add(name)
            lies = getattr(modules[owner], "is_transposed", False) and len(src.shape(name)) == 3
            src.transposed = src.transposed or lies
    else:
        made.left[name] = why.get(owner, "not a linear layer's weight")


def _is_matrix(m: nn.Module, leaf: str) -> bool:
    if isinstance(m, nn.Linear):
        return leaf == "weight"
    return leaf in (m.stacks if isinstance(m, Experts) else names_of_stacks(m) if is_stacked(m) else ())


def _by_names(made: Chosen, src: Source, plain: list[str], policy: Policy, layout: Layout) -> None:
    """Names, shapes and dtypes are all there is."""
    plain = sorted(plain, key=naming.natural)
    able = []
    for name in plain:
        why = _why_plain(name, src, layout)
        if why is None:
            able.append(name)
        elif len(src.shape(name)) >= 2:
            made.left[name] = why
    of = {name: naming.module_of(name) for name in able}
    decision = by_names_alone(list(dict.fromkeys(of.values())), policy)
    for name in able:
        spec = None if of[name] in decision.left else policy.recipe("rl_sampler", of[name]).fprop.w
        if spec is None:
            made.left[name] = decision.left.get(of[name], "the sampler of its policy does not quantize it")
        else:
            made.specs[name] = spec
    made.stacked = {name for name in made.specs if naming.SEPARATE.match(name) or naming.STACK.match(name)}
    embeds = any("embed" in name for name in src.names())
    if embeds and not any(naming.module(name).rpartition(".")[2] == "lm_head" for name in src.names()):
        made.linear = ["lm_head"]  # a tied head is in the model, not in the checkpoint


def _why_plain(name: str, src: Source, layout: Layout) -> str | None:
    """Why a weight is no matrix that could be quantized, by its name, shape and dtype; None where it may be one."""
    shape = src.shape(name)
    why = naming.why_not_linear(name, shape)
    if why is not None:
        return why
    if src.config.get("model_type") in naming.CONV1D and not naming.is_stack(name, shape):
        return "a matrix of Conv1D, [K, N], which has no 4-bit form here"
    if src.dtype(name) not in _FLOATS:
        return f"its dtype is {str(src.dtype(name)).removeprefix('torch.')}"
    return "tiny" if torch.Size(shape).numel() < SMALL else None
