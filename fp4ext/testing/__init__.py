"""What tests and benchmarks share: inputs that hurt, and comparisons that say where."""

from . import fuzz
from .compare import assert_bytes_equal, assert_same_quantized
from .generators import KINDS, generate

__all__ = ["KINDS", "assert_bytes_equal", "assert_same_quantized", "fuzz", "generate"]
