"""The names of a model's modules as its author wrote them, without what wraps the model or a part of it.

torch.compile, DistributedDataParallel and the like hold the wrapped module under a name of their own, which then stands
in every name below it ("_orig_mod.layers.0.up", "module.layers.0.up"). Policies, reports and checkpoints use the names
without it ("layers.0.up").
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.optim.swa_utils import AveragedModel

# Names that only a wrapper gives: torch.compile, FSDP, activation checkpointing, and peft's layer around a layer.
WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
# Wrappers whose inner name, `module`, is too common to be one by itself.
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name without wrappers, module) of each module once, in the model's order. Wrappers themselves are left out."""
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        inner = _wrapped(module)
        if inner is None:
            yield name, module
        for part, child in module._modules.items():
            if child is not None:
                yield from walk(child, name if part == inner else f"{name}.{part}" if name else part)

    yield from walk(model, "")


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrappers around a whole model."""
    while (inner := _wrapped(model)) is not None:
        model = model.get_submodule(inner)
    return model


def block_of(name: str) -> str:
    """The repeated block that a module is in: its name up to the first number ("model.layers.3"), else the name."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def in_last_blocks(names: list[str], share: float) -> list[str]:
    """Those of some modules, given in the model's order, that are in the last `share` of their blocks.

    Blocks are counted by block_of in the order in which they first appear. share·blocks is rounded, a half upwards, and
    is at least one block where share > 0. A block is never cut.
    """
    blocks = list(dict.fromkeys(map(block_of, names)))
    kept = min(len(blocks), max(1, int(share * len(blocks) + 0.5))) if share > 0 else 0
    last = set(blocks[len(blocks) - kept :])
    return [name for name in names if block_of(name) in last]


def _wrapped(module: nn.Module) -> str | None:
    """The name under which a wrapper holds what it wraps, None for a module that is no wrapper."""
    found = next((part for part in WRAPPED if part in module._modules), None)
    return "module" if found is None and isinstance(module, WRAPPERS) else found
