"""fp4ext: train, sample and reinforce PyTorch models in 4 bits. See README.md and docs/."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any


def _is_command() -> bool:
    """Whether this process is `python -m fp4ext`, or the script `fp4ext`: its --help needs no torch."""
    if sys.argv[:1] == ["-m"]:  # so it is while Python looks for the module to run
        return sys.orig_argv[-len(sys.argv)] == "fp4ext"
    return bool(sys.argv) and Path(sys.argv[0]).name == "fp4ext"


if TYPE_CHECKING or not _is_command():
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
    "rl",
    "set_draw_rank",
    "set_step",
    "stage",
    "storage_bits",
    "train",
]


_EAGER = ("policy", "functional", "nn", "conversion")
_LAZY = ("audit", "distributed", "export", "integrations", "rl", "train")


def __getattr__(name: str) -> Any:
    """What is imported when it is first used: _LAZY, and everything else where the process is the command line."""
    if name in _EAGER + _LAZY:
        return importlib.import_module(f".{name}", __name__)
    for package in _EAGER if name in __all__ else ():
        module = importlib.import_module(f".{package}", __name__)
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names alone."""
    return [*__all__, "__version__"]
