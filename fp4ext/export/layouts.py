"""The layouts by name, and which of them a checkpoint is in."""

from __future__ import annotations

from .compressed_tensors import CompressedTensors
from .errors import Invalid
from .folder import Folder
from .fp4ext import Fp4ext
from .gpt_oss import GptOss
from .inkling import Inkling
from .inkling2 import Inkling2
from .layout import Layout, Plain
from .modelopt import ModelOpt

LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (CompressedTensors(), ModelOpt(), GptOss(), Inkling(), Inkling2(), Fp4ext())
}


def get(name: str | Layout) -> Layout:
    """The layout of that name. Raises Refused, listing the names there are."""
    if isinstance(name, Layout):
        return name
    if not isinstance(name, str) or name not in LAYOUTS:
        raise Invalid(f"unknown layout {name!r}; accepted: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def detect(folder: Folder) -> Layout:
    """The layout that a checkpoint is in, by its tensors (its config may be wrong); Plain where nothing is packed.

    Raises:
        Refused: the tensors are those of two layouts.
    """
    claims = [layout for layout in LAYOUTS.values() if layout.claims(folder)]
    if len(claims) > 1:
        names = " and ".join(layout.name for layout in claims)
        raise Invalid(f"{folder.path}: tensors of {names}; accepted: one layout a checkpoint")
    return claims[0] if claims else Plain()
