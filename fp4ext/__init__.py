"""fp4ext: train, sample and reinforce PyTorch models in 4 bits. See README.md and docs/."""

import importlib

import torch  # noqa: F401  (loads libtorch before _C)

from . import formats, policies
from .backends import backends
from .convert import Report, convert, revert, set_step, storage_bits
from .formats import Format
from .gemm import gemm
from .linear import Linear, linear
from .noise import gradient_noise
from .policy import Policy, current_stage, stage
from .qtensor import QTensor
from .quantize import quantize
from .recipe import Dgrad, Fprop, Recipe, Wgrad
from .spec import Spec

__version__ = "0.1.0"

__all__ = [
    "Dgrad",
    "Format",
    "Fprop",
    "Linear",
    "Policy",
    "QTensor",
    "Recipe",
    "Report",
    "Spec",
    "Wgrad",
    "audit",
    "backends",
    "convert",
    "current_stage",
    "formats",
    "gemm",
    "gradient_noise",
    "linear",
    "policies",
    "quantize",
    "revert",
    "set_step",
    "stage",
    "storage_bits",
]


def __getattr__(name: str):
    """`fp4ext.audit`, imported when it is first asked for: training does without it."""
    if name == "audit":
        return importlib.import_module(".audit", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
