"""fp4ext: train, sample and reinforce PyTorch models in 4 bits. See README.md and docs/."""

import importlib

import torch  # noqa: F401  (loads libtorch before _C)

from . import formats, policies
from .attention import attention
from .backends import backends
from .convert import Report, convert, revert, set_step, storage_bits
from .experts import Experts, grouped_linear
from .formats import Format
from .gemm import gemm
from .grouped import Ragged, grouped_gemm, grouped_quantize
from .linear import Linear, linear
from .noise import gradient_noise
from .ops import set_draw_rank
from .packed import pack, packed_weights, refit
from .policy import Policy
from .qtensor import QTensor
from .quantize import quantize
from .quantized import QuantizedExperts, QuantizedLinear
from .recipe import Dgrad, Fprop, Recipe, Wgrad
from .spec import Spec
from .stages import current_stage, stage

__version__ = "0.1.0"

__all__ = [
    "Dgrad",
    "Experts",
    "Format",
    "Fprop",
    "Linear",
    "Policy",
    "QTensor",
    "QuantizedExperts",
    "QuantizedLinear",
    "Ragged",
    "Recipe",
    "Report",
    "Spec",
    "Wgrad",
    "attention",
    "audit",
    "backends",
    "convert",
    "current_stage",
    "formats",
    "gemm",
    "gradient_noise",
    "grouped_gemm",
    "grouped_linear",
    "grouped_quantize",
    "linear",
    "pack",
    "packed_weights",
    "policies",
    "quantize",
    "refit",
    "revert",
    "set_draw_rank",
    "set_step",
    "stage",
    "storage_bits",
    "train",
]


def __getattr__(name: str):
    """fp4ext.audit, export, train and trainer, imported when they are first used: others do without them."""
    if name in ("audit", "export", "train", "trainer"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
