"""load: a checkpoint's weights by name, or into a model whose linear layers then stay packed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from ..conversion.names import named_modules, unwrapped
from ..nn.experts import Experts
from ..nn.packed_layers import QuantizedExperts, QuantizedLinear, QuantizedStacked
from ..nn.transformers_experts import is_stacked, names_of_stacks, why_not
from ..policy import policies
from ..policy.policy import Policy
from . import arrange, naming, origin, recorded
from .checkpoint import AnyWeight, Checkpoint
from .errors import Invalid, shown
from .fp8 import Fp8
from .fp8_linear import Fp8Linear
from .origin import Part
from .progress import Bar
from .stored import Stored, interleave, separate


def load(
    path: str | Path,
    model: nn.Module | None = None,
    *,
    policy: Policy | str | None = None,
    progress: bool | None = None,
) -> Checkpoint | nn.Module:
    """Open a checkpoint; with a model, fill it.

    Args:
        path: a folder or a .safetensors file, plain or in any layout.
        model: of the class that the checkpoint is of; on the meta device it takes no memory before. Its parameters have
            the checkpoint's names, or those that its class in transformers makes of them. Linear layers with a
            quantized weight become QuantizedLinear (of FP8, Fp8Linear), in place, fp4ext.Experts QuantizedExperts, and
            experts of transformers hold their stacks likewise; other quantized weights are dequantized into their
            parameters.
        policy: whose sampler quantizes the packed layers' inputs, where in the weights' format; default: the policy
            that `save` recorded in the checkpoint, else "end_to_end".
        progress: show a bar on stderr; default: on a terminal.

    Returns:
        The Checkpoint (name → QTensor, Fp8 or Tensor, read when asked for), or the model. A warning names scales of a
        KV cache, and weights beside those of the index, for which the model has no place.

    Raises:
        Refused: a damaged checkpoint, one that does not fit the model, or an unknown policy. The model is then as it
            was.
    """
    checkpoint = Checkpoint(path)
    if model is None:
        return checkpoint
    if not isinstance(model, nn.Module):
        raise Invalid(f"model is {type(model).__name__}; accepted: a torch.nn.Module")
    policy = policies.get(policy or recorded.policy(checkpoint.folder.root) or "end_to_end")
    model_inside = unwrapped(model)
    # Stacks of the layout fp4ext have all of gate first, those of gpt-oss alternate, whatever the model has.
    turn = {(True, False): separate, (False, True): interleave}.get(
        (checkpoint.layout.transposed, origin.alternates(model_inside))
    )
    modules = dict(named_modules(model_inside))
    state = _state(modules)
    found = _origins(checkpoint, model_inside, state, modules)
    new: dict[str, AnyWeight] = {}
    with Bar(sum(map(checkpoint.nbytes, checkpoint)), progress) as bar:
        for name, parts in found.items():
            new[name] = _fitted(checkpoint, name, parts, state[name], modules)
            w = new[name]
            if turn and isinstance(w, Stored) and name in checkpoint and name.endswith("gate_up_proj"):
                new[name] = w.rows(turn(w.q.shape[-2]))
            bar.advance(sum(checkpoint.nbytes(n) for n in {part.name for part in parts}), name)
    for name, w in list(new.items()):
        if isinstance(w, Stored) and not _packs(name, new, modules):
            new[name] = _plain(w, state[name], modules[name.rpartition(".")[0]])
    _put(model_inside, state, new)
    for owner in dict.fromkeys(name.rpartition(".")[0] for name, w in new.items() if isinstance(w, (Stored, Fp8))):
        _pack(model_inside, owner, modules[owner], new, policy)
    return model


def _state(modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names without wrappers."""
    state: dict[str, Tensor] = {}
    for name, m in modules.items():
        dot = f"{name}." if name else ""
        own: dict[str, Tensor] = {n: p for n, p in m._parameters.items() if p is not None}
        own |= {n: b for n, b in m._buffers.items() if b is not None and n not in m._non_persistent_buffers_set}
        state |= {f"{dot}{n}": t for n, t in own.items()}
    return state


def _origins(
    checkpoint: Checkpoint, model: nn.Module, state: dict[str, Tensor], modules: dict[str, nn.Module]
) -> dict[str, list[Part]]:
    """Parameter → what of the checkpoint it is made of. Raises Refused where the two don't fit."""
    known = [name for name in checkpoint if name not in _recomputed(modules)]
    lengths = {name: tuple(t.shape) for name, t in state.items()}
    shapes = {name: checkpoint.shape(name) for name in known}
    for n in origin.lying_stacks(model):  # packed stacks are [E, N, K], such parameters [E, K, N]
        if n in shapes and checkpoint.format(n) is not None:
            shapes[n] = (shapes[n][0], shapes[n][2], shapes[n][1])
    found = origin.of_parameters(model, lengths, shapes)
    used = {part.name for parts in found.values() for part in parts}
    tied = {id(state[name]) for name in found}
    dropped = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unknown = [n for n in known if n not in used and not any(re.search(pattern, n) for pattern in dropped)]
    remade = getattr(model, "_keys_to_ignore_on_save", None) or ()
    unused = [n for n in unknown if n not in lengths and _is_optional(checkpoint, n)]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        what = f"{shown(unused[0], 200)}{more}"
        warnings.warn(f"{checkpoint.folder.path}: the model has no place for {what}; not loaded", stacklevel=3)
        unknown = [n for n in unknown if n not in set(unused)]
    missing = [name for name, t in state.items() if name not in found and id(t) not in tied and name not in remade]
    odd = next((n for n in unknown if n in lengths), None)
    if odd is not None:
        what = f"{odd!r} is {shapes[odd]}; accepted: {lengths[odd]}, as in the model"
        raise Invalid(f"{checkpoint.folder.path}: {what}")
    for what, names in (("the model has no", unknown), ("it lacks", missing)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            accepted = "accepted: a model of the same names"
            raise Invalid(f"{checkpoint.folder.path}: {what} {names[0]!r}{more}; {accepted}")
    return found


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


def _fitted(
    checkpoint: Checkpoint, name: str, parts: list[Part], old: Tensor, modules: dict[str, nn.Module]
) -> AnyWeight:
    """What takes the place of a parameter or buffer, as it is stored where all of it is quantized alike."""
    owner = modules[name.rpartition(".")[0]]
    lies = _lies(owner, old)
    whole = {n: checkpoint.weight(n) for n in dict.fromkeys(part.name for part in parts)}
    stored = {n: w for n, w in whole.items() if isinstance(w, Stored)}
    if len(stored) == len(whole):
        packed = _assembled(parts, stored, (old.shape[0], old.shape[2], old.shape[1]) if lies else tuple(old.shape))
        if packed is not None:
            return packed
    first = whole[parts[0].name]
    is_weight = bool(name.rpartition(".")[0]) and isinstance(owner, nn.Linear) and name.endswith(".weight")
    if is_weight and len(parts) == 1 and isinstance(first, Fp8) and first.shape == old.shape and parts[0].in_order:
        return first
    dtype = old.dtype if old.dtype.is_floating_point else torch.float32
    pieces = [_rows(_dequantized(whole[n], dtype), rows) for n, rows in parts]
    value = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if len(parts) == 1 and isinstance(first, Tensor) and first.shape == old.shape and parts[0].in_order:
        value = first
    if value.numel() != old.numel():
        shape = checkpoint.shape(parts[0].name)
        raise Invalid(f"{checkpoint.folder.path}: {name!r} is {shape}; accepted: {tuple(old.shape)}, as in the model")
    if value.shape != old.shape:
        stands = len(parts) > 1 or len(value.shape) == 2
        value = value.reshape(old.shape[0], old.shape[2], old.shape[1]).mT if lies and stands else value.view(old.shape)
    value = value.contiguous()
    return value.to(old.dtype) if old.dtype.is_floating_point and value.is_floating_point() else value


def _dequantized(w: AnyWeight, dtype: torch.dtype) -> Tensor:
    if isinstance(w, Fp8):
        return w.dequantize(dtype)
    return w.q.dequantize(dtype) if isinstance(w, Stored) else w


def _lies(owner: nn.Module, old: Tensor) -> bool:
    """Whether a parameter is a stack [E, K, N], its contraction in the middle."""
    return old.dim() == 3 and bool(getattr(owner, "is_transposed", False))


def _rows(w: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a tensor, or elements of a vector, over all of its matrices."""
    return w.flatten(0, -2)[rows] if w.dim() > 1 else w.reshape(-1)[rows]


def _assembled(parts: list[Part], whole: dict[str, Stored], shape: tuple[int, ...]) -> Stored | None:
    """Quantized rows as one matrix or stack; None where they are not quantized alike."""
    first = whole[parts[0].name]
    if len({w.q.format for w in whole.values()}) > 1:
        return None
    if len(parts) == 1 and tuple(first.q.shape) == shape:
        return first if parts[0].in_order else _reordered(first, parts[0].rows)
    try:
        if len(shape) == 2:
            made = arrange.packed_over_each_other("", [_matrix(whole[part.name], part) for part in parts])
        else:
            made = arrange.pile_packed([arrange.packed_over_each_other("", e) for e in _by_expert(parts, whole, shape)])
    except Invalid:  # outer scales that differ
        return None
    return made if tuple(made.q.shape) == shape else None


def _by_expert(parts: list[Part], whole: dict[str, Stored], shape: tuple[int, ...]) -> list[list[Stored]]:
    """The pieces of each expert of a stack, in order."""
    experts: list[list[Stored]] = [[]]
    filled = 0
    for part in parts:
        experts[-1].append(_matrix(whole[part.name], part))
        filled += len(part.rows)
        if filled == shape[1]:
            experts, filled = [*experts, []], 0
    return experts[:-1]


def _matrix(w: Stored, part: Part) -> Stored:
    """The rows `part` of a matrix, or of one expert of a stack."""
    n = w.q.shape[-2]
    one = w if len(w.q.shape) == 2 else w.matrix(int(part.rows[0]) // n)
    return one if len(part.rows) == n and part.in_order else one.rows(part.rows % n)


def _reordered(w: Stored, rows: Tensor) -> Stored:
    """A stack with the rows of every expert in the order of the first."""
    n = w.q.shape[-2]
    return w.rows(rows[:n] % n)


def _plain(w: Stored, old: Tensor, owner: nn.Module) -> Tensor:
    value = w.q.dequantize(old.dtype if old.dtype.is_floating_point else torch.float32)
    return value.mT.contiguous() if _lies(owner, old) else value


def _put(model: nn.Module, state: dict[str, Tensor], new: dict[str, AnyWeight]) -> None:
    """Give plain parameters and buffers their new memory. What was tied stays tied."""
    values = {id(state[name]): value for name, value in new.items() if isinstance(value, Tensor)}
    made: dict[int, nn.Parameter] = {}
    for m in model.modules():
        for leaf, p in m._parameters.items():
            if p is not None and id(p) in values:
                made.setdefault(id(p), nn.Parameter(values[id(p)], requires_grad=p.requires_grad))
                m._parameters[leaf] = made[id(p)]
        for leaf, b in m._buffers.items():
            if id(b) in values:
                m._buffers[leaf] = values[id(b)]


def _packs(name: str, new: dict[str, AnyWeight], modules: dict[str, nn.Module]) -> bool:
    """Whether a quantized weight can stay so in its module: of experts, both stacks are."""
    owner, _, leaf = name.rpartition(".")
    m = modules[owner]
    if isinstance(m, nn.Linear):
        return bool(owner) and leaf == "weight"
    stacks = _stacks(m)
    dot = f"{owner}." if owner else ""
    return bool(owner) and leaf in stacks and all(isinstance(new.get(f"{dot}{s}"), Stored) for s in stacks)


def _stacks(m: nn.Module) -> tuple[str, ...]:
    """The names of the stacks of experts that have a packed form."""
    if type(m) is Experts:
        return m.stacks
    return names_of_stacks(m) if is_stacked(m) and why_not(m) is None else ()


def _pack(model: nn.Module, owner: str, old: nn.Module, new: dict[str, AnyWeight], policy: Policy) -> None:
    """Put a packed layer in the place of a linear one, or of experts."""
    layer: nn.Module
    leaves = ("weight",) if isinstance(old, nn.Linear) else _stacks(old)
    weights = {leaf: new[f"{owner}.{leaf}"] for leaf in leaves}
    held = {leaf: w.q for leaf, w in weights.items() if isinstance(w, Stored)}
    if isinstance(old, nn.Linear):
        w = weights["weight"]
        if isinstance(w, Fp8):
            layer = Fp8Linear(w, old.bias)
        else:
            layer = QuantizedLinear.of(held["weight"], old.bias, policy, owner)
    elif type(old) is Experts:
        layer = QuantizedExperts.of(held["gate_up_proj"], held["down_proj"], policy, owner)
    else:
        x = policy.recipe("rl_sampler", owner).fprop.x
        alike = x is not None and all(q.format is x.fmt for q in held.values())
        layer = QuantizedStacked.holding(old, held, x if alike else None)
    for parent in model.modules():
        for leaf, child in parent._modules.items():
            if child is old:
                parent._modules[leaf] = layer.train(old.training)
