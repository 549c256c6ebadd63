"""fp4ext: train, sample and reinforce PyTorch models in 4 bits. See README.md and docs/."""

import importlib
from types import ModuleType

import torch  # noqa: F401  (loads libtorch before _C)

from .conversion import Report, convert, pack, packed_weights, refit, revert, set_step, storage_bits
from .functional import (
    QTensor,
    Ragged,
    attention,
    backends,
    gemm,
    grouped_gemm,
    grouped_quantize,
    quantize,
    set_draw_rank,
)
from .nn import Experts, Linear, QuantizedExperts, QuantizedLinear, gradient_noise, grouped_linear, linear
from .policy import Dgrad, Format, Fprop, Policy, Recipe, Spec, Wgrad, current_stage, formats, policies, stage

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
    "distributed",
    "export",
    "formats",
    "gemm",
    "gradient_noise",
    "grouped_gemm",
    "grouped_linear",
    "grouped_quantize",
    "integrations",
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


_LAZY = ("audit", "distributed", "export", "integrations", "train")


def __getattr__(name: str) -> ModuleType:
    """Import a package that the rest does not need when it is first used."""
    if name in _LAZY:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names alone."""
    return [*__all__, "__version__"]
