"""The four stages in one job: pretrain in 4 bits, reinforce in 4 bits, write a 4-bit checkpoint, read it back.

`python -m fp4ext end-to-end` is the face of this; from Python:

    from fp4ext.train.end_to_end import Config, end_to_end, resume
    result = end_to_end(Config(preset="moe-task"), out="runs/whole")
    print(result.reloaded.tokens_equal, result.reloaded.tokens)
"""

from .config import Config
from .loop import end_to_end, resume
from .result import Exported, Reloaded, Result

__all__ = ["Config", "Exported", "Reloaded", "Result", "end_to_end", "resume"]
