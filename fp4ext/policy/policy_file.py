"""A Policy as a TOML or JSON file. `audit` writes one; every argument that takes a policy's name takes its path too.

    name = "mine"
    keep_also = ["layers.0.*"]                         # added to the default, which `keep` would replace

    [pretrain.fprop]
    x = "nvfp4/sweep"                                  # a Spec's key; trailing parts may be left out
    w = "nvfp4/sweep"

    [pretrain.dgrad]
    dy = "nvfp4/sweep/eden/1x16/tensor/128x2"
    w = "nvfp4/sweep/eden/1x16/tensor/128x2"
    from_fprop = true

    [[rules]]                                          # the first pattern that matches a module counts
    pattern = "blocks.0.*"
    recipe = { fprop = { x = "mxfp8", w = "mxfp8" } }

An operand that is left out stays in BF16. Reasons are comments in TOML, and values of the key "why" in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from .. import files
from ..errors import Refused
from .formats import Format
from .policy import KEEP, Policy
from .recipe import Dgrad, Fprop, Recipe, Wgrad
from .spec import Spec, as_spec

GEMMS = {"fprop": Fprop, "dgrad": Dgrad, "wgrad": Wgrad}
RECIPES = ("pretrain", "rl_sampler", "rl_trainer")
SUFFIXES = (".toml", ".json")


Table = dict[str, Any]


def _is_list(value: object, inner: type) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, inner) for item in value)


# The values of a file by name: a check, and what is accepted.
VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda v: isinstance(v, str) and v != "", "a text"),
    "keep": (lambda v: _is_list(v, str), 'a list of patterns, such as ["lm_head", "*.router"]'),
    "keep_last": (lambda v: type(v) in (int, float) and 0 <= v <= 1, "a share from 0 to 1"),
    "rules": (lambda v: _is_list(v, object), "a list of tables, each of a pattern and a recipe"),
    "bf16_forward_from": (lambda v: v is None or (type(v) is int and v >= 0), "a step, a whole number from 0"),
    "mean_split": (lambda v: isinstance(v, bool), "true, false"),
}


def load(path: str | Path) -> Policy:
    """Read a policy from a file.

    Raises:
        ValueError: the file cannot be read, or does not hold a policy; the message says where.
    """
    path = Path(path)
    try:
        if path.suffix not in SUFFIXES:
            raise Refused(f"its name ends in {path.suffix!r}; accepted: {', '.join(SUFFIXES)}")
        text = files.read(path).decode()
        data = _toml(text) if path.suffix == ".toml" else files.parse_json(text)
        if not isinstance(data, dict):
            raise Refused(f"it holds a {type(data).__name__}; accepted: a table")
        return from_dict({"name": path.stem} | data)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise Refused(f"policy file {path}: {reason}") from None


def from_dict(data: Table) -> Policy:
    """The policy of a file's contents. Raises ValueError or TypeError where they are no policy."""
    values = {key: value for key, value in data.items() if key != "why"}
    known = {field.name for field in fields(Policy)} | {"keep_also"}
    _table("a policy", values, known)
    for name, (good, accepted) in VALUES.items():
        if name in values and not good(values[name]):
            raise Refused(f"{name} is {_short(values[name])}; accepted: {accepted}")
    for stage in RECIPES:
        if stage in values:
            values[stage] = _recipe(stage, values[stage])
    for key in ("keep", "keep_also"):
        if key in values:
            values[key] = _patterns(key, values[key])
    values["keep"] = (*values.get("keep", KEEP), *values.pop("keep_also", ()))
    rules = []
    for i, data in enumerate(values.get("rules", ())):
        rule = _table(f"rules[{i}]", data, {"pattern", "recipe", "why"})
        if not isinstance(rule.get("pattern", ""), str):
            raise Refused(f"rules[{i}].pattern is {_short(rule['pattern'])}; accepted: a text")
        if "pattern" not in rule:
            raise Refused(f"rules[{i}] has no pattern; accepted: a pattern of module names, and a recipe")
        rules.append((rule["pattern"], _recipe(f"rules[{i}].recipe", rule.get("recipe", {}))))
    return Policy(**{**values, "rules": tuple(rules)})


def to_dict(policy: Policy) -> Table:
    """The contents of a policy's file; from_dict turns them into an equal policy.

    A `keep` that starts with the default is written as `keep_also`, the patterns that it adds.
    """
    adds = policy.keep[: len(KEEP)] == KEEP
    out: Table = {"name": policy.name}
    out |= {"keep_also": list(policy.keep[len(KEEP) :])} if adds else {"keep": list(policy.keep)}
    for name in ("keep_last", "bf16_forward_from", "mean_split", "stats_every"):
        value = getattr(policy, name)
        if value:
            out[name] = value
    for stage in RECIPES:
        recipe = getattr(policy, stage)
        if recipe is not None:
            out[stage] = _recipe_dict(recipe)
    if policy.rules:
        out["rules"] = [{"pattern": pattern, "recipe": _recipe_dict(recipe)} for pattern, recipe in policy.rules]
    return out


def dumps(policy: Policy, why: dict[str, str] | None = None, form: str = "toml") -> str:
    """The text of a policy's file.

    Args:
        why: reasons by dotted name ("pretrain.fprop.x", "keep", "rules.0"); "" is a reason for the whole policy.
        form: "toml" or "json".
    """
    data, why = to_dict(policy), why or {}
    if form == "json":
        return json.dumps(data | ({"why": why} if why else {}), indent=1, ensure_ascii=False) + "\n"
    lines = [f"# {reason}" for reason in [why.get("")] if reason]
    for key, value in data.items():
        if key not in (*RECIPES, "rules"):
            lines += _line(key, value, why.get("keep" if key == "keep_also" else key))
    for stage in RECIPES:
        for gemm, operands in data.get(stage, {}).items():
            if not isinstance(operands, dict):
                continue
            lines += ["", f"[{stage}.{gemm}]"]
            for key, value in operands.items():
                lines += _line(key, value, why.get(f"{stage}.{gemm}.{key}"))
        if stage in data and not data[stage]:
            lines += ["", *([f"# {why[stage]}"] if stage in why else []), f"[{stage}]"]
    for i, rule in enumerate(data.get("rules", ())):
        lines += ["", "[[rules]]"]
        lines += _line("pattern", rule["pattern"], why.get(f"rules.{i}"))
        lines += [f"recipe = {_value(rule['recipe'])}"]
    return "\n".join(lines) + "\n"


def _patterns(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(pattern, str) for pattern in value):
        raise Refused(f'{key} is {value!r}; accepted: a list of patterns, e.g. ["lm_head", "*.router"]')
    return tuple(value)


def _line(key: str, value: object, reason: str | None) -> list[str]:
    return ([f"# {reason}"] if reason else []) + [f"{key} = {_value(value)}"]


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _toml(text: str) -> Table:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    try:
        table: Table = tomllib.loads(text)
    except RecursionError:
        raise Refused("nested too deep") from None
    return table


def _recipe(where: str, data: object) -> Recipe:
    table = _table(where, data, {*GEMMS, "mean_split", "why"})
    made: Table = {}
    for gemm, kind in GEMMS.items():
        if gemm not in table:
            continue
        accepted = {field.name for field in fields(kind)}
        values = {**_table(f"{where}.{gemm}", table[gemm], accepted | {"why"})}
        values.pop("why", None)
        for key, value in values.items():
            if key == "from_fprop":
                if not isinstance(value, bool):
                    raise Refused(f"{where}.{gemm}.from_fprop is {value!r}; accepted: true, false")
            else:
                values[key] = _spec(f"{where}.{gemm}.{key}", value)
        made[gemm] = kind(**values)
    split = table.get("mean_split", False)
    if not isinstance(split, bool):
        raise Refused(f"{where}.mean_split is {_short(split)}; accepted: true, false")
    return Recipe(**made, mean_split=split)


def _spec(where: str, key: object) -> Spec | None:
    if key is None or key == "bf16":
        return None
    if not isinstance(key, (str, Format, Spec)):
        raise Refused(f"{where} is {key!r}; accepted: a spec such as 'nvfp4/sweep', or 'bf16'")
    try:
        return as_spec(key)
    except ValueError as error:
        raise Refused(f"{where}: {error}") from None


def _recipe_dict(recipe: Recipe) -> Table:
    out: Table = {}
    for gemm in GEMMS:
        operands = {k: v.key if isinstance(v, Spec) else v for k, v in vars(getattr(recipe, gemm)).items() if v}
        if operands:
            out[gemm] = operands
    return out | ({"mean_split": True} if recipe.mean_split else {})


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _table(where: str, data: object, accepted: set[str]) -> Table:
    """data, a table with no other keys than those. Raises ValueError for anything else."""
    if not isinstance(data, dict):
        raise Refused(f"{where} is {_short(data)}; accepted: a table")
    for key in data:
        if key not in accepted:
            raise Refused(f"{where} has no {key!r}; accepted: {', '.join(sorted(accepted))}")
    return data
