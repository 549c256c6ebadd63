"""fp4ext.export: checkpoints that others read and write.

    fp4ext.export.save(model, "out", layout="compressed-tensors")    a model, or a checkpoint's path, to 4 bits on disk
    weights = fp4ext.export.load("out")                              name → QTensor, read when asked for
    fp4ext.export.load("out", model)                                 a model whose linear layers stay packed
    fp4ext.export.convert_checkpoint("out", "new", layout="modelopt")           the same bits in another layout

A layout is a reader and a writer in a file of its own; header.py and folder.py doubt everything; writer.py leaves a
whole checkpoint or none. docs/interchange.md has the layouts, and who has read what.
"""

from ..errors import Refused
from ..extras import export as _packages  # noqa: F401  (first: an ImportError that names the extra)
from .checkpoint import Checkpoint
from .inspection import Inspection, inspect
from .layouts import LAYOUTS
from .loading import load
from .relayout import convert_checkpoint
from .saving import Report, save
from .stored import Outer, Stored

__all__ = [
    "LAYOUTS",
    "Checkpoint",
    "Inspection",
    "Outer",
    "Refused",
    "Report",
    "Stored",
    "convert_checkpoint",
    "inspect",
    "load",
    "save",
]
