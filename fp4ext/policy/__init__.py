"""Formats, specs, recipes and policies: which tensors are quantized, and how. Data; nothing is computed here.

A Format has a name, a block length and a largest value. A Spec says how one operand is quantized. A Recipe holds the
Specs of the six operands of a linear layer's three GEMMs. A Policy gives each module a Recipe by stage, name and step.
"""

from .formats import Format
from .policy import Policy
from .recipe import Dgrad, Fprop, Recipe, Wgrad
from .spec import Spec, as_spec
from .stages import current_stage, stage

__all__ = ["Dgrad", "Format", "Fprop", "Policy", "Recipe", "Spec", "Wgrad", "as_spec", "current_stage", "stage"]
