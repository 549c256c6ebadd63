"""pack: a model for inference, whose converted layers hold their weights quantized once and nothing else.

    packed = pack(model)     4.5 bits a weight (quantized.py); the model keeps its master weights
    packed(x)                in stage "rl_sampler": the bits of model(x), which quantizes its weights at every call
    refit(packed, model)     after the model has learned: new codes in the same memory

Nothing here knows what the model is: attention and the layers that stay plain have to be row-invariant by themselves.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from ..errors import Refused
from ..functional.grouped import grouped_quantize
from ..functional.qtensor import QTensor
from ..functional.quantization import quantize
from ..nn.dense import Linear
from ..nn.experts import Experts
from ..nn.packed_layers import QuantizedExperts, QuantizedLinear, QuantizedStacked
from ..nn.transformers_experts import Stacked, is_stacked
from ..policy.spec import Spec
from ..policy.stages import check_stage
from .names import named_modules


def pack(model: nn.Module, stage: str = "rl_sampler") -> nn.Module:
    """A copy of the model, in eval mode and without gradients, whose converted layers are quantized.

    fp4ext.Linear becomes QuantizedLinear, fp4ext.Experts QuantizedExperts, and converted experts of transformers hold
    their stacks likewise. Layers whose recipe quantizes no weights in that stage are copied as they are. Hooks on a
    forward stay where they are. The copy's `save_pretrained`, where the model has one, raises: it would write codes
    that no config describes. fp4ext.export.save writes a packed model.

    Raises:
        ValueError: an unknown stage, a recipe that rounds weights at random, weights that are sharded.
    """
    check_stage(stage)
    # deepcopy takes what is in the memo for a copy that it has made already, so master weights are never copied.
    memo: dict[int, nn.Module] = {}
    for module in model.modules():
        recipe = module.recipes[stage] if isinstance(module, (Linear, Experts, Stacked)) else None
        if recipe is not None and recipe.fprop.w is not None:
            _check_whole(module)
            if recipe.needs_rng:
                why = f"the recipe of stage {stage} is random ({recipe.fprop.w})"
                raise Refused(f"{why}; accepted: one that rounds weights to nearest")
            memo[id(module)] = _quantized(module, recipe.fprop.x, recipe.fprop.w)
            for hooks in HOOKS:
                setattr(memo[id(module)], hooks, copy.copy(getattr(module, hooks)))
    packed = copy.deepcopy(model, memo).eval().requires_grad_(False)
    if memo and hasattr(packed, "save_pretrained"):
        packed.__dict__["save_pretrained"] = _no_save_pretrained  # not a parameter, module or buffer
    return packed


def _check_whole(module: nn.Module) -> None:
    for name, p in module.named_parameters(recurse=False):
        if hasattr(p, "device_mesh"):
            raise Refused(
                f"{name} of a {type(module).__name__} is sharded over {p.device_mesh}; accepted: a model with whole "
                "weights (torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True)"
            )


def _no_save_pretrained(*args: object, **kwargs: object) -> None:
    raise NotImplementedError(
        "save_pretrained would write a packed model's codes without a config that describes them; accepted: "
        "fp4ext.export.save(model, folder), which others read too"
    )


def packed_weights(model: nn.Module) -> list[QTensor]:
    """The matrices that a model holds as codes."""
    return [w for m in model.modules() if isinstance(m, QUANTIZED) for w in m.weights]


@torch.no_grad()
def refit(packed: nn.Module, model: nn.Module) -> None:
    """Give a packed copy the present weights of its model, in place: nothing is allocated but one layer's codes.

    The model's layers may be plain, or converted by another policy: weights are quantized as `pack` did.

    Raises:
        ValueError: a module of the copy that the model lacks.
    """
    modules = dict(named_modules(model))
    for name, module in named_modules(packed):
        if name not in modules:
            raise Refused(f"the model has no {name!r}; accepted: the model that was packed")
        theirs = modules[name]
        if isinstance(module, QUANTIZED):  # the same buffers, made anew
            if module.w is None:
                raise Refused(
                    f"{name!r} does not know how its weights were quantized; accepted: a model from fp4ext.pack"
                )
            theirs = _quantized(theirs, module.x, module.w)
        new = dict(theirs.named_parameters(recurse=False)) | dict(theirs.named_buffers(recurse=False))
        for key, t in (module._parameters | module._buffers).items():
            if t is not None:
                t.copy_(new[key])


QUANTIZED = (QuantizedLinear, QuantizedExperts, QuantizedStacked)
HOOKS = [f"_forward_{kind}" for kind in ("hooks", "hooks_with_kwargs", "hooks_always_called")]
HOOKS += [f"_forward_pre_{kind}" for kind in ("hooks", "hooks_with_kwargs")]


@torch.no_grad()
def _quantized(module: nn.Module, x: Spec | None, w: Spec) -> nn.Module:
    if is_stacked(module):
        return QuantizedStacked.of(module, x, w)
    if isinstance(module, Experts):
        gate_up, down = (grouped_quantize(t, w, role="w") for t in (module.gate_up_proj, module.down_proj))
        return QuantizedExperts(gate_up, down, x, w)
    weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
    return QuantizedLinear(quantize(weight, w, role="w"), None if bias is None else bias.detach().clone(), x, w)
