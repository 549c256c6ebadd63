"""Experts change their arrangement: a stack, or modules of their own; gate and up in halves, or row by row.

    separate     experts.3.gate_proj.weight [F, D], .up_proj.weight [F, D], .down_proj.weight [D, F]
    stacked      experts.gate_up_proj [E, 2F, D], all of gate first; experts.down_proj [E, D, F]
    alternating  experts.w13_weight [E, 2F, D], rows g0, u0, g1, u1, …; experts.w2_weight [E, D, F]

Rows move whole, with their block scales, so it loses nothing. What is quantized and what is plain moves alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..policy.formats import Format
from . import naming
from .errors import Invalid
from .layout import Layout
from .stored import Outer, Stored, interleave, separate, spread

Weight = Stored | Tensor


def names_of_stack(layout: Layout) -> tuple[str, str]:
    """What a layout calls the two stacks of a layer's experts."""
    return ("gate_up_proj", "down_proj") if layout.transposed else ("w13_weight", "w2_weight")


def unstack(name: str, weight: Weight, alternating: bool) -> list[tuple[str, Weight]]:
    """A stack as matrices with names of their own."""
    experts, part = naming.of_stack(name)
    n = rows(weight)
    if part in ("gate_up_proj", "w13_weight"):
        weight = reorder(weight, separate(n)) if alternating else weight
        halves = {"gate_proj": slice(0, n // 2), "up_proj": slice(n // 2, n)}
    else:
        halves = {"down_proj": slice(None)}
    return [
        (f"{experts}.{e}.{half}.weight", matrix(weight, e, which))
        for e in range(count(weight))
        for half, which in halves.items()
    ]


def restack(name: str, weight: Weight, alternating: bool, layout: Layout) -> tuple[str, Weight]:
    """A stack under a layout's names, its rows alternating."""
    experts, part = naming.of_stack(name)
    both, down = names_of_stack(layout)
    if part in ("down_proj", "w2_weight"):
        return f"{experts}.{down}", weight
    return f"{experts}.{both}", weight if alternating else reorder(weight, interleave(rows(weight)))


def as_named(name: str, weight: Weight) -> tuple[str, Weight]:
    """A stack whose rows alternate, in the arrangement that its name promises: gate_up_proj has all of gate first."""
    in_halves = naming.of_stack(name)[1] == "gate_up_proj"
    return name, reorder(weight, separate(rows(weight))) if in_halves else weight


Anew = Callable[[str, Tensor], Stored]  # (name, values) → quantized anew


def stack(
    experts: str, parts: dict[str, dict[int, Weight]], layout: Layout, anew: Anew | None = None
) -> tuple[str, Weight]:
    """Matrices of their own, part → expert → weight, as one stack: gate and up, or down.

    Gate and up under different outer scales, and experts of different formats, go through `anew`, or are refused.
    """
    both, down = names_of_stack(layout)
    numbers = [sorted(part) for part in parts.values()]
    if any(n != list(range(len(numbers[0]))) for n in numbers):
        raise Invalid(f"{experts}: experts {numbers[0]} of a layer; accepted: all from 0, each with the same parts")
    if "down_proj" in parts:
        return f"{experts}.{down}", pile([parts["down_proj"][e] for e in numbers[0]], anew)
    pairs = [
        over_each_other(f"{experts}.{e}.{both}", [parts["gate_proj"][e], parts["up_proj"][e]], anew) for e in numbers[0]
    ]
    whole = pile(pairs, anew)
    return f"{experts}.{both}", reorder(whole, interleave(rows(whole)))


def is_stack(weight: Weight) -> bool:
    """Whether it is [E, ., .]."""
    return len(weight.q.shape if isinstance(weight, Stored) else weight.shape) == 3


def rows(weight: Weight) -> int:
    """How many rows each of its matrices has."""
    return (weight.q.shape if isinstance(weight, Stored) else weight.shape)[-2]


def count(weight: Weight) -> int:
    """How many experts a stack has."""
    return (weight.q.shape if isinstance(weight, Stored) else weight.shape)[0]


def matrix(weight: Weight, e: int, which: slice = slice(None)) -> Weight:
    """Some rows of one expert."""
    return weight.matrix(e, which) if isinstance(weight, Stored) else weight[e, which]


def reorder(weight: Weight, order: Tensor) -> Weight:
    """The rows of each matrix in another order."""
    return weight.rows(order) if isinstance(weight, Stored) else weight[..., order, :]


def under_one_outer(weights: dict[str, Stored]) -> tuple[dict[str, Stored], dict[str, int]]:
    """Matrices of NVFP4 under the largest of their outer scales, for readers that multiply them as one; and how many
    block scales of each were rounded for it.

    Outer scales are powers of two: a block scale then moves by a power of two, which is exact unless it becomes
    subnormal. Codes stay, so what decodes is the same but in blocks whose scale is rounded. Matrices with other outer
    scales stay as they are.
    """
    values = {name: w.nvfp4_outer.value for name, w in weights.items()}
    if not all(v.dim() == 0 and v > 0 and v.log2().frac() == 0 for v in values.values()):
        return weights, {}
    most = torch.stack(list(values.values())).max()
    made: dict[str, Stored] = {}
    rounded: dict[str, int] = {}
    for name, w in weights.items():
        if values[name] != most:
            old = w.q.scales.float() * (values[name] / most)
            scales = old.to(w.q.scales.dtype)
            live = (w.q.codes & 0x77).unflatten(-1, (-1, w.q.format.block // 2)).any(-1)
            changed = int(((scales.float() != old) & live).sum())
            rounded |= {name: changed} if changed else {}
            w = replace(w, q=replace(w.q, scales=scales, global_scale=most), outer=Outer(most)).without_zero_scales()
        made[name] = w
    return made, rounded


def over_each_other(name: str, weights: Sequence[Weight], anew: Anew | None = None) -> Weight:
    """Matrices, all plain or all quantized, over each other; quantized ones by packed_over_each_other."""
    if len(weights) == 1:
        return weights[0]
    packed = [w for w in weights if isinstance(w, Stored)]
    if packed:
        return packed_over_each_other(name, packed, anew)
    return torch.cat([w for w in weights if isinstance(w, Tensor)])


def packed_over_each_other(name: str, weights: list[Stored], anew: Anew | None = None) -> Stored:
    """Quantized matrices over each other, under one outer scale.

    Raises:
        Refused: their formats or outer scales differ, and there is no `anew` to quantize them again.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    for w in weights[1:]:
        if first.q.format is not w.q.format or (first.outer is not None and not first.outer.is_exactly(w.nvfp4_outer)):
            if anew is not None:
                values = torch.cat([w.q.dequantize(torch.float32) for w in weights])
                return replace(anew(name, values), input_amax=_largest(weights))
            raise Invalid(
                f"{name}: gate and up of an expert have outer scales that differ, and a stack has one for both; "
                "accepted: equal ones, or requantize"
            )
    shape = torch.Size((sum(w.q.shape[0] for w in weights), first.q.shape[1]))
    codes, scales = (_bytes(torch.cat, [getattr(w.q, what) for w in weights]) for what in ("codes", "scales"))
    q = replace(first.q, codes=codes, scales=scales, shape=shape)
    return replace(first, q=q, input_amax=_largest(weights))


def _largest(weights: list[Stored]) -> Tensor | None:
    """The largest of the inputs' maxima, where all are known: a stack has one."""
    known = [w.input_amax for w in weights if w.input_amax is not None]
    return torch.stack(known).amax(0) if len(known) == len(weights) else None


def _bytes(join: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    """join of tensors as bytes: torch joins few of the 8-bit types."""
    return join([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)


def pile(weights: Sequence[Weight], anew: Anew | None = None) -> Weight:
    """Matrices [N, K], all plain or all quantized → [E, N, K]."""
    packed = [w for w in weights if isinstance(w, Stored)]
    return pile_packed(packed, anew) if packed else torch.stack([w for w in weights if isinstance(w, Tensor)])


def pile_packed(weights: list[Stored], anew: Anew | None = None) -> Stored:
    """Quantized matrices [N, K] → [E, N, K], in the format of them all, or of what `anew` makes.

    Raises:
        Refused: their formats differ, and there is no `anew`.
    """
    formats_: set[Format] = {w.q.format for w in weights}
    if len(formats_) > 1 and anew is not None:
        amaxes = [w.input_amax for w in weights]
        weights = [anew(f"expert {e}", w.q.dequantize(torch.float32)) for e, w in enumerate(weights)]
        weights = [replace(w, input_amax=amax) for w, amax in zip(weights, amaxes, strict=True)]
    elif len(formats_) > 1:
        raise Invalid(f"experts of a stack in {', '.join(map(str, formats_))}; accepted: one format, or requantize")
    first = weights[0]
    codes, scales = (_bytes(torch.stack, [getattr(w.q, what) for w in weights]) for what in ("codes", "scales"))
    outer = None
    if first.outer is not None:
        outer = Outer(
            *(torch.stack([getattr(w.outer, what) for w in weights]) for what in ("numerator", "denominator"))
        )
    q = replace(first.q, codes=codes, scales=scales, shape=torch.Size((len(weights), *first.q.shape)))
    q = q if outer is None else replace(q, global_scale=spread(outer.value))
    return Stored(q, outer, _largest(weights))
