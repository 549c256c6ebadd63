"""Configurations and how two of them differ."""

from __future__ import annotations

RUN = "config.json: run"  # what messages call the configuration in that file


def tell_changes(show, began: dict, now: dict) -> None:
    """Say what is not as it was when a run began: `facts` then and now."""
    for change in compare(began, now):
        show.note(f"since the run began, {change}: what follows may differ in bits")


def compare(old: dict, new: dict, prefix: str = "") -> list[str]:
    """What differs between two configurations, as "name: old, now new"."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += compare(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {_short(a)}, now {_short(b)}")
    return found


def _short(value) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
