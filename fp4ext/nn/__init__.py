"""Layers that train in 4 bits, and layers whose weights stay in 4 bits."""

from .dense import Linear, linear
from .experts import Experts, grouped_linear
from .noise import gradient_noise
from .packed_layers import QuantizedExperts, QuantizedLinear

__all__ = [
    "Experts",
    "Linear",
    "QuantizedExperts",
    "QuantizedLinear",
    "gradient_noise",
    "grouped_linear",
    "linear",
]
