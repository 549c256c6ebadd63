"""What is quantized how: formats, specs, recipes and policies. Data, with no arithmetic.

A Format is a name with its block length and largest value, a Spec says how one operand is quantized, a Recipe has the
six operands of a linear layer's three GEMMs, and a Policy gives each module a Recipe by stage, name and step.
"""

from .formats import Format
from .policy import Policy
from .recipe import Dgrad, Fprop, Recipe, Wgrad
from .spec import Spec, as_spec
from .stages import current_stage, stage

__all__ = ["Dgrad", "Format", "Fprop", "Policy", "Recipe", "Spec", "Wgrad", "as_spec", "current_stage", "stage"]
