"""load: a checkpoint's weights by name, or into a model whose linear layers then stay packed."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import policies
from ..experts import Experts
from ..policy import Policy
from ..qtensor import QTensor
from ..quantized import QuantizedExperts, QuantizedLinear
from . import naming
from .checkpoint import Checkpoint
from .errors import Refused, shown
from .fp8 import Fp8
from .fp8_linear import Fp8Linear
from .progress import Bar


def load(
    path: str | Path,
    model: nn.Module | None = None,
    *,
    policy: Policy | str = "end_to_end",
    progress: bool | None = None,
) -> Checkpoint | nn.Module:
    """Open a checkpoint; with a model, fill it.

    Args:
        path: a folder or a .safetensors file, plain or in any layout.
        model: a module whose parameters have the checkpoint's names; on the meta device it takes no memory before.
            Its linear layers with a quantized weight become QuantizedLinear (of FP8, Fp8Linear), in place, and its
            fp4ext.Experts QuantizedExperts; other quantized weights are dequantized into their parameters.
        policy: whose sampler quantizes the packed layers' inputs, where in the weights' format.
        progress: show a bar on stderr; default: on a terminal.

    Returns:
        The Checkpoint (name → QTensor, Fp8 or Tensor, read when asked for), or the model. A warning names scales of a
        KV cache, and weights beside those of the index, for which the model has no place.

    Raises:
        Refused: a checkpoint that cannot be believed, or one that does not fit the model, which is then as it was.
        ValueError: an unknown policy, likewise.
    """
    checkpoint = Checkpoint(path)
    if model is None:
        return checkpoint
    if not isinstance(model, nn.Module):
        raise Refused(f"model is {type(model).__name__}; accepted: a torch.nn.Module")
    policy = policies.get(policy)
    modules = dict(model.named_modules())
    state = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    recomputed = _recomputed(modules)
    known = [name for name in checkpoint if name not in recomputed]
    unused = [name for name in known if name not in state and _is_optional(checkpoint, name)]
    if unused:
        what = f"{shown(unused[0], 200)}{f' and {len(unused) - 1} more' if len(unused) > 1 else ''}"
        warnings.warn(f"{path}: the model has no place for {what}; not loaded", stacklevel=2)
        known = [name for name in known if name not in set(unused)]
    _check_names(checkpoint, known, state)
    new: dict[str, Tensor | QTensor | Fp8] = {}
    with Bar(sum(map(checkpoint.nbytes, known)), progress) as bar:
        for name in known:
            new[name] = _fitted(checkpoint, name, state[name], modules)
            bar.advance(checkpoint.nbytes(name), name)
    _put(model, state, new)
    for name, value in new.items():
        if isinstance(value, (QTensor, Fp8)):
            _pack(model, name, value, new, policy)
    return model


def _is_optional(checkpoint: Checkpoint, name: str) -> bool:
    """What a model may do without: scales of a KV cache, and what lies in a file beside those of the index."""
    return naming.is_cache_scale(name) or checkpoint.folder.is_beside(name)


def _recomputed(modules: dict[str, nn.Module]) -> set[str]:
    """Buffers that a model makes for itself (position tables): old checkpoints have some, and they don't count."""
    return {
        f"{name}.{leaf}" if name else leaf
        for name, module in modules.items()
        for leaf in module._non_persistent_buffers_set
    }


def _check_names(checkpoint: Checkpoint, known: list[str], state: dict[str, Tensor]) -> None:
    unknown = [name for name in known if name not in state]
    tied = {id(state[name]) for name in known if name in state}
    missing = [name for name, t in state.items() if name not in checkpoint and id(t) not in tied]
    for what, names in (("the model has no", unknown), ("it lacks", missing)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise Refused(f"{checkpoint.folder.path}: {what} {names[0]!r}{more}; accepted: a model of the same names")


def _fitted(checkpoint: Checkpoint, name: str, old: Tensor, modules: dict[str, nn.Module]) -> Tensor | QTensor | Fp8:
    """What takes the place of a parameter or buffer."""
    value = checkpoint[name]
    stack = isinstance(value, QTensor) and naming.is_stack(name, tuple(value.shape))
    shape = tuple(value.shape)
    if stack and checkpoint.layout.transposed:
        shape = (shape[0], shape[2], shape[1])
    if shape != tuple(old.shape):
        raise Refused(f"{checkpoint.folder.path}: {name!r} is {shape}; accepted: {tuple(old.shape)}, as in the model")
    owner, _, leaf = name.rpartition(".")
    module = modules.get(owner)
    if isinstance(value, (QTensor, Fp8)) and owner and isinstance(module, nn.Linear) and leaf == "weight":
        return value
    if isinstance(value, QTensor) and owner and type(module) is Experts and _packs(checkpoint, owner):
        return value
    dtype = old.dtype if old.dtype.is_floating_point else None
    if isinstance(value, Fp8):
        return value.dequantize(dtype)
    if isinstance(value, QTensor):
        plain = value.dequantize(dtype or torch.float32)
        return plain.mT.contiguous() if stack and checkpoint.layout.transposed else plain
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _put(model: nn.Module, state: dict[str, Tensor], new: dict[str, Tensor | QTensor]) -> None:
    """Give plain parameters and buffers their new memory. What was tied stays tied."""
    values = {id(state[name]): value for name, value in new.items() if isinstance(value, Tensor)}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, p in module._parameters.items():
            if id(p) in values:
                made.setdefault(id(p), nn.Parameter(values[id(p)], requires_grad=p.requires_grad))
                module._parameters[leaf] = made[id(p)]
        for leaf, b in module._buffers.items():
            if id(b) in values:
                module._buffers[leaf] = values[id(b)]


def _packs(checkpoint: Checkpoint, owner: str) -> bool:
    """Whether both stacks of an fp4ext.Experts are quantized."""
    names = [f"{owner}.{leaf}" for leaf in ("gate_up_proj", "down_proj")]
    return all(name in checkpoint and checkpoint.format(name) is not None for name in names)


def _pack(model: nn.Module, name: str, weight: QTensor | Fp8, new, policy: Policy | str) -> None:
    """Put a packed layer in the place of a linear one, or of experts once both stacks are there."""
    owner, _, leaf = name.rpartition(".")
    old = model.get_submodule(owner)
    if isinstance(weight, Fp8):
        layer = Fp8Linear(weight, old.bias)
    elif isinstance(old, nn.Linear):
        layer = QuantizedLinear.of(weight, old.bias, policy, owner)
    elif leaf == "gate_up_proj":
        layer = QuantizedExperts.of(weight, new[f"{owner}.down_proj"], policy, owner)
    else:
        return
    parent, _, last = owner.rpartition(".")
    setattr(model.get_submodule(parent), last, layer.train(old.training))
