"""A model in high precision becomes one in 4 bits: which modules (decided once), in place or as a packed copy."""

from .in_place import Report, convert, revert, set_step, storage_bits
from .packing import pack, packed_weights, refit

__all__ = ["Report", "convert", "pack", "packed_weights", "refit", "revert", "set_step", "storage_bits"]
