"""Converted models on several processes, beside what torch.distributed does alone.

DDP, FSDP2 and the tensor-parallel styles of torch need nothing from here: a converted layer is an nn.Linear to them
(fp4ext/nn/sharded.py). Here is what only quantized layers need.
"""

from ..functional.ops import set_draw_rank
from ..nn.shards import share_amax
from .expert_parallel import ExpertParallel
from .wire import gather_quantized

__all__ = ["ExpertParallel", "gather_quantized", "set_draw_rank", "share_amax"]
