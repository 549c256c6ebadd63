"""The packages that only one part of fp4ext needs: `pip install 'fp4ext[train]'`, or `[all]`.

`from fp4ext.extras import train` gives the names of the packages that fp4ext.train needs, and raises ImportError where
one of them is not installed.
"""

from __future__ import annotations

from importlib.util import find_spec

NEEDED = {
    "export": ("safetensors", "rich"),
    "audit": ("safetensors", "rich", "numpy"),
    "train": ("safetensors", "rich", "numpy"),  # matplotlib draws a picture where it is there
}


def __getattr__(extra: str) -> tuple[str, ...]:
    """The packages of an extra. Raises ImportError, which names the extra, where one is missing."""
    if extra not in NEEDED:
        raise AttributeError(f"module {__name__!r} has no attribute {extra!r}")
    missing = [name for name in NEEDED[extra] if find_spec(name) is None]
    if missing:
        raise ImportError(f"fp4ext.{extra} needs {', '.join(missing)}: pip install 'fp4ext[{extra}]'")
    return NEEDED[extra]
