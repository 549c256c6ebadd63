"""A module's class beneath FSDP2's.

`fully_shard` gives the very object that it is called on a class of its own, FSDPLinear(FSDPModule, Linear) say, so that
the type of a layer that is sharded alone is no longer nn.Linear. Conversion changes the class beneath.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import cast

from torch import nn


def class_of(module: nn.Module) -> type[nn.Module]:
    """The module's class; where fully_shard has made one of its own, the class that it was made from."""
    kind = type(module)
    return kind.__bases__[1] if _is_sharded(kind) else kind


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module another class, beneath that of fully_shard where there is one."""
    own = type(module)
    module.__class__ = _sharded(cast(Hashable, own), cast(Hashable, kind)) if _is_sharded(own) else kind


def _is_sharded(kind: type) -> bool:
    bases = kind.__bases__
    return (
        len(bases) == 2 and bases[0].__name__ == "FSDPModule" and bases[0].__module__.startswith("torch.distributed.")
    )


@cache
def _sharded(own: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    more = {name: value for name, value in vars(own).items() if name == "__deepcopy__"}
    return type(f"FSDP{kind.__name__}", (own.__bases__[0], kind), more)
