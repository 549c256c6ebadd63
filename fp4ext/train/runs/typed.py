"""Dataclasses from JSON: every value is of its field's type, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from fp4ext.errors import Refused

# By annotation. JSON has one kind of number: a float may be written without a point, a bool is none.
KINDS = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
    "Sequence[str]": (list,),
    "dict[str, dict]": (dict,),
    "dict[str, str]": (dict,),
    "Path": (str,),
}


def make(kind: type, values, where: str, **more):
    """An object of that dataclass from `values` (see check) and from `more`, which are taken as they are.

    Raises:
        Refused: what check refuses, and what the class itself refuses; the message begins with `where`.
    """
    values = check(kind, values, where)
    try:
        return kind(**values | more)
    except Refused as error:
        raise Refused(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None
    except TypeError as error:
        raise Refused(f"{where}: {error}; accepted: all of {', '.join(f.name for f in fields(kind))}") from None


def check(kind: type, values, where: str) -> dict:
    """The values, if they can be arguments of that dataclass.

    Args:
        where: what the values are called in a message, such as "config.json: run".

    Raises:
        Refused: no object, a name that is no field's, a value of another type. Fields whose type is a class of their
            own are left to that.
    """
    if not isinstance(values, Mapping):
        raise Refused(f"{where} is {_short(values)}; accepted: an object")
    known = {field.name: str(field.type) for field in fields(kind)}
    for name, value in values.items():
        if name not in known:
            raise Refused(f"{where} has an unknown {name!r}; accepted: {', '.join(known)}")
        parts = [part.strip() for part in known[name].split("|")]
        accepted = [k for part in parts for k in KINDS.get(part, (object,))]
        inner = {"Sequence[str]": str, "dict[str, dict]": dict, "dict[str, str]": str}.get(parts[0], object)
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        good = isinstance(value, tuple(accepted)) and (bool in accepted or not isinstance(value, bool))
        if not good or not all(isinstance(item, inner) for item in items):
            raise Refused(f"{where}.{name} is {_short(value)}; accepted: {known[name]}")
    return dict(values)


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
