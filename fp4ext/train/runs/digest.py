"""JSON files that carry the digest of what they say, so that a flipped bit or an edit is seen and not believed.

    {"run": {"seed": 0, …}, …, "digests": {"run.seed": "5feceb66", …}, "digest": "…"}

`digest` is of everything but itself. `digests`, where a file has them, are of its values one by one: they tell which
of them was changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from fp4ext import files
from fp4ext.errors import Refused

KEYS = ("digest", "digests")


def of(data: bytes) -> str:
    """The digest of bytes, as hexadecimal digits."""
    return blake2b(data, digest_size=16).hexdigest()


def dumps(value: dict, one_by_one: bool = False) -> bytes:
    """The file of a value; digests that it has from before are made anew."""
    value = {key: v for key, v in value.items() if key not in KEYS}
    if one_by_one:
        value["digests"] = dict(_leaves(value))
    return json.dumps(value | {"digest": _whole(value)}, indent=1, allow_nan=False).encode() + b"\n"


def read(path: Path) -> dict:
    """What such a file says, its digests included.

    Raises:
        Refused: it is missing, unreadable, no JSON object, without a digest, or not what was written.
    """
    try:
        value = files.parse_json(files.read(path))
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}); accepted: the file as it was written") from None
    except ValueError as error:
        raise Refused(f"{path}: not valid JSON ({error}); accepted: the file as it was written") from None
    if not isinstance(value, dict) or not isinstance(value.get("digest"), str):
        raise Refused(f"{path}: no digest in it; accepted: the file as this version of fp4ext writes it")
    if value["digest"] != _whole({key: v for key, v in value.items() if key != "digest"}):
        changed = ", ".join(_changed(value)) or "digests differ"
        raise Refused(f"{path}: not what was written ({changed}); accepted: the file as it was written")
    return value


def _whole(value: dict) -> str:
    return of(json.dumps(value, sort_keys=True).encode())


def _leaves(value, name: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, short digest) of each value that is no object with something in it."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    else:
        yield name, of(json.dumps(value, sort_keys=True).encode())[:8]


def _changed(value: dict) -> list[str]:
    """Names of the values that are not what they were."""
    before = value.get("digests")
    if not isinstance(before, dict):
        return []
    now = dict(_leaves({key: v for key, v in value.items() if key not in KEYS}))
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
