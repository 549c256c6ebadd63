"""Reinforcement learning in 4 bits: a packed sampler, a trainer that agrees with it, and what happens without that.

`python -m fp4ext rl` is the face of this; from Python:

    from fp4ext.train.rl import Config, reinforce, resume
    result = reinforce(Config(source="runs/start", arms=["matched"]), out="runs/rl")
    for row in result.rows: print(row.arm, row.reward_before, row.reward_after, row.max_abs_d)
"""

from .config import Config
from .loop import reinforce, resume
from .result import Result, Row

__all__ = ["Config", "Result", "Row", "reinforce", "resume"]
