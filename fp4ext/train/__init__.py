"""Reference workloads: a transformer over bytes, trained under several policies side by side.

`python -m fp4ext pretrain` is the face of this; from Python:

from fp4ext.train import Config, pretrain, resume
result = pretrain(Config("tiny", policies=["bf16", "nvidia"]), out="runs/first")
for row in result.rows: print(row.policy, row.final_loss, row.gap)
"""

import importlib

from fp4ext.errors import Refused, Stopped
from fp4ext.extras import train as _packages  # noqa: F401  (first: an ImportError that names the extra)

from .pretraining.config import Config
from .pretraining.loop import pretrain, resume
from .pretraining.result import Result, Row
from .runs.presets import PRESETS, Preset, Shape

__all__ = ["PRESETS", "Config", "Preset", "Refused", "Result", "Row", "Shape", "Stopped", "pretrain", "resume"]


def __getattr__(name: str):
    """The workloads that need more of the package, imported when they are first used."""
    if name in ("end_to_end", "exported", "rl"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
