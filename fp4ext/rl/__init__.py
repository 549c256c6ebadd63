"""Reinforcement with verifiable rewards on token log-probs: the objective, and what a foreign sampler changes.

These functions know no model, run or engine: tensors are [sequences, tokens], with a bool mask of the sampled tokens.

    objective   advantages, the clipped policy loss, KL to a reference
    bridge      how far a sampler's log-probs are from the trainer's, and the weights that correct for it
"""

from . import bridge, objective
from .bridge import Disagreement, disagreement, guard
from .objective import Objective, advantages

__all__ = ["Disagreement", "Objective", "advantages", "bridge", "disagreement", "guard", "objective"]
