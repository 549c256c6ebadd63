"""A module as a source of `save`, under the names of its checkpoint."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..conversion.names import named_modules, unwrapped
from ..functional.qtensor import QTensor
from ..nn.packed_layers import QuantizedExperts, QuantizedLinear, QuantizedStacked
from . import origin
from .checkpoint import AnyWeight, Checkpoint
from .fp8 import Fp8
from .fp8_linear import Fp8Linear
from .source import FromCheckpoint, InMemory, Source
from .stored import Stored

Held = Tensor | QTensor | Fp8  # what a module holds of a weight
PACKED = (QuantizedLinear, QuantizedExperts, QuantizedStacked, Fp8Linear)


def of_model(model: nn.Module, scratch: ExitStack) -> Source:
    """The Source of a module; its `model` is that module, without what wraps it.

    A model that saves itself (transformers) knows its checkpoint's names, which are not its modules': it writes a plain
    checkpoint first, which lives as long as `scratch`. One that is packed is named by its class's conversions.
    """
    model = unwrapped(model)
    weights = weights_of(model)
    of_transformers: Any = model  # where it saves itself: transformers is optional, and so are its types
    packed = any(isinstance(module, PACKED) for module in model.modules())
    if not hasattr(model, "save_pretrained") or (packed and not origin.is_of_transformers(model)):
        source: Source = InMemory(weights, {"architectures": [type(model).__name__]})
    elif packed:
        named = origin.to_checkpoint(model, weights)
        held = {n: _taken(w, weights) if isinstance(w, list) else w for n, w in named.items()}
        about = json.loads(of_transformers.config.to_json_string()) | {"architectures": [type(model).__name__]}
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.bfloat16)
        source = InMemory(held, about | {"dtype": str(dtype).removeprefix("torch.")})
    else:
        folder = scratch.enter_context(tempfile.TemporaryDirectory(prefix="fp4ext-"))
        inside = any(module is not unwrapped(module) for module in model.modules())
        of_transformers.save_pretrained(folder, state_dict=weights if inside else None)
        source = FromCheckpoint(Checkpoint(folder))
    source.model = model
    source.alternating = source.alternating or origin.alternates(model)
    return source


def weights_of(model: nn.Module) -> dict[str, Held]:
    """A module's parameters and persistent buffers by their names without wrappers; packed layers as what they hold, a
    stack of experts as [E, N, K]."""
    weights: dict[str, Held] = {}
    for prefix, module in named_modules(model):
        dot = f"{prefix}." if prefix else ""
        own: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
        if isinstance(module, QuantizedExperts):
            weights |= {f"{dot}{leaf}": getattr(module, leaf) for leaf in ("gate_up_proj", "down_proj")}
        elif isinstance(module, QuantizedStacked):
            weights |= {f"{dot}{leaf}": module.held(leaf) for leaf in module.stacks}
        elif isinstance(module, (QuantizedLinear, Fp8Linear)):
            weights[f"{dot}weight"] = module.weight
        else:
            buffers = dict(module.named_buffers(recurse=False))
            own |= {leaf: b for leaf, b in buffers.items() if leaf not in module._non_persistent_buffers_set}
        weights |= {f"{dot}{leaf}": own[leaf].detach() for leaf in sorted(own)}
    return weights


def _taken(parts: list[origin.Part], weights: dict[str, Held]) -> AnyWeight:
    """Rows of one quantized parameter: all of it, or of a stack some rows of one expert."""
    (part,) = parts
    q = weights[part.name]
    if not isinstance(q, QTensor):
        return q
    whole = Stored.of(q)
    if len(part.rows) == q.shape[:-1].numel() and part.in_order:
        return whole
    n = q.shape[-2]
    expert, order = part.rows // n, part.rows % n
    if len(q.shape) == 2 or bool((expert == expert[0]).all()):
        return (whole if len(q.shape) == 2 else whole.matrix(int(expert[0]))).rows(order)
    return whole.rows(order[:n])  # the rows of every expert in the same order
