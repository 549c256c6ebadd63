"""Which rows of which of a model's parameters a checkpoint's tensors hold.

A class of transformers renames, splits, joins and reorders its parameters on the way to its checkpoint and back. What
it does is found by doing it: its own conversions run on tensors of row numbers, one a row, instead of weights. For
other modules, the names of a checkpoint are those of the parameters.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..conversion.names import named_modules
from ..functional.qtensor import QTensor
from ..nn.packed_layers import QuantizedStacked
from ..nn.transformers_experts import is_stacked, names_of_stacks
from . import naming
from .fp8 import Fp8
from .stored import interleave, separate

FIRST = 1 << 40  # row numbers start here, so that no weight can be taken for one


class Part(NamedTuple):
    """Rows of one named tensor, numbered over all of its matrices.

    Attributes:
        name: the tensor's.
        rows: int64 [R].
    """

    name: str
    rows: Tensor

    @property
    def in_order(self) -> bool:
        """Whether the rows follow each other."""
        return bool((self.rows.diff() == 1).all())


def of_parameters(
    model: nn.Module, state: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[Part]]:
    """For each parameter of a model, the tensors of a checkpoint that it is made of, in its rows' order.

    Args:
        state: parameter → shape. shapes: the checkpoint's tensor → shape.

    Returns:
        Those parameters whose origin is found whole. Rows of a parameter [E, K, N], which has its contraction in the
        middle, are numbered along N where the checkpoint has them so too, else along K, as the tensor's own are.
    """
    numbers, lying = _Numbers(shapes), set(lying_stacks(model))
    made = _converted(model, state, numbers) if is_of_transformers(model) else {}
    found = {}
    for name, shape in state.items():
        t = made.get(name)
        if t is None and name in shapes:
            t = numbers.of(name)
        if t is None:
            t = _stacked(name, shapes, numbers, alternates(model))
            t = t if t is None or name not in lying else t.mT
        if t is not None and _fits(t, shape):
            found[name] = numbers.parts(t)
    return found


def to_checkpoint(model: Any, weights: Mapping[str, Tensor | QTensor | Fp8]) -> dict[str, Tensor | Fp8 | list[Part]]:
    """A model's weights under the names of its class's checkpoint: plain ones as they are there, of quantized ones the
    rows that the tensor has.

    Args:
        model: of a class of transformers.
        weights: parameter → weight; a stack of experts as [E, N, K].
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    numbers = _Numbers({name: tuple(w.shape) for name, w in weights.items() if isinstance(w, QTensor)})
    state: dict[str, Any] = {name: numbers.of(name) if isinstance(w, QTensor) else w for name, w in weights.items()}
    for name, module in named_modules(model):
        if getattr(module, "is_transposed", False) and isinstance(module, QuantizedStacked):
            state |= {n: state[n].mT for n in (f"{name}.{leaf}" for leaf in module.stacks)}
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    done = revert_weight_conversion(model, state)
    return {name: numbers.parts(t) if numbers.are(t) else t for name, t in done.items()}


def alternates(model: nn.Module) -> bool:
    """Whether the stacks of a model alternate gate and up by rows."""
    return getattr(getattr(model, "config", None), "model_type", None) in naming.TRANSPOSED


def lying_stacks(model: nn.Module) -> list[str]:
    """The parameters of a model that are stacks of experts [E, K, N], their contraction in the middle."""
    return [
        f"{name}.{leaf}" if name else leaf
        for name, m in named_modules(model)
        if getattr(m, "is_transposed", False) and is_stacked(m)
        for leaf in names_of_stacks(m)
    ]


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is of a class of transformers, which then is there to be asked."""
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)


class _Numbers:
    """Row numbers of named tensors, each row of all of them with one of its own."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.shapes, self.first, self.names, at = shapes, {}, list(shapes), FIRST
        for name, shape in shapes.items():
            self.first[name] = at
            at += self._rows(shape)
        self.starts = torch.tensor([self.first[name] for name in self.names] + [at])

    @staticmethod
    def _rows(shape: tuple[int, ...]) -> int:
        return torch.Size(shape[:-1] if len(shape) > 1 else shape).numel()

    def of(self, name: str) -> Tensor:
        """[.., N, 1] of a tensor [.., N, K], [N] of a vector."""
        shape = self.shapes[name]
        rows = torch.arange(self.first[name], self.first[name] + self._rows(shape))
        return rows.reshape(*shape[:-1], 1) if len(shape) > 1 else rows.reshape(shape)

    @staticmethod
    def are(t: Tensor) -> bool:
        return t.dtype == torch.int64 and t.numel() > 0 and bool((t >= FIRST).all())

    def parts(self, t: Tensor) -> list[Part]:
        """The runs of rows of one tensor in t, in order."""
        flat = t.reshape(-1)
        owner = torch.searchsorted(self.starts, flat, right=True) - 1
        ends = [0, *((owner[1:] != owner[:-1]).nonzero().flatten() + 1).tolist(), len(flat)]
        found = []
        for a, b in zip(ends[:-1], ends[1:], strict=True) if len(flat) else ():
            name = self.names[int(owner[a])]
            found.append(Part(name, flat[a:b] - self.first[name]))
        return found


def _fits(t: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether row numbers are those of a whole parameter, in either orientation."""
    if not _Numbers.are(t) or t.dim() != len(shape):
        return False
    upright = len(shape) > 1 and tuple(t.shape[:-1]) == shape[:-1] and t.shape[-1] == 1
    lying = len(shape) > 1 and (*t.shape[:-2], t.shape[-1]) == (*shape[:-2], shape[-1]) and t.shape[-2] == 1
    return tuple(t.shape) == shape or upright or lying


def _converted(model: Any, state: Mapping[str, object], numbers: _Numbers) -> dict[str, Tensor]:
    """Parameter → row numbers of what transformers' loader would put there. As it does, step by step."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: m for m in converters for pattern in m.source_patterns}
    collected: dict[str, WeightRenaming | WeightConverter] = {}
    prefix = re.escape(model.base_model_prefix)
    for name in sorted(numbers.names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, dict(state))
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, dict(state))
        if target not in state:
            continue
        if pattern is None:
            job = collected.setdefault(target, WeightRenaming(name, target))
        else:
            job = collected.setdefault(target, copy.deepcopy(by_pattern[pattern]))
        rows: Any = numbers.of(name)  # add_tensor is declared for futures, and takes tensors
        job.add_tensor(target, name, pattern or name, rows)
    made: dict[str, Tensor] = {}
    for target, job in collected.items():
        try:
            done = job.convert(target, model=model, config=model.config)
        except Exception:  # an operation that wants whole matrices: this parameter's origin is not known
            continue
        made |= {name: t[0] if isinstance(t, list) else t for name, t in done.items()}
    return made


def _stacked(name: str, shapes: Mapping[str, tuple[int, ...]], numbers: _Numbers, alternating: bool) -> Tensor | None:
    """The row numbers of a stack of experts that a layout has unstacked or interleaved; None where it has not."""
    match = naming.STACK.match(name)
    if match is None:
        return None
    prefix, both = match["experts"], match["part"] in ("gate_up_proj", "w13_weight")
    other = f"{prefix}.{'w13_weight' if both else 'w2_weight'}"
    if other in shapes:
        t = numbers.of(other)
        return t[:, separate(t.shape[1])] if both and not alternating else t
    halves = ("gate_proj", "up_proj") if both else ("down_proj",)
    experts, e = [], 0
    while all(f"{prefix}.{e}.{half}.weight" in shapes for half in halves):
        experts.append(torch.cat([numbers.of(f"{prefix}.{e}.{half}.weight") for half in halves]))
        e += 1
    if not experts:
        return None
    t = torch.stack(experts)
    return t[:, interleave(t.shape[1])] if both and alternating else t
