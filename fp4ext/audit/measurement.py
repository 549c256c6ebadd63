"""measure: quantization errors of a model's layers on batches, under one or more policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from ..conversion.in_place import nothing_converted
from ..errors import Refused
from ..nn.noise import gradient_noise, weights
from ..policy import policies as known
from ..policy.policy import Policy
from .capture import Layer, Loss, capture, layers_of, loss_of, mean_loss, plain, under
from .layer import judge
from .operand import DRAWS
from .report import Report


def measure(
    model: nn.Module,
    batches: Iterable,
    policies: Sequence[str | Policy] = ("end_to_end",),
    *,
    loss: Loss = loss_of,
    draws: int = DRAWS,
    tokens: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Report:
    """Measure what policies do to a model, for each layer and operand.

    Args:
        model: a plain or converted model; afterwards it is as before.
        batches: tuples or dicts of the model's arguments; a few are enough.
        policies: Policies or their names.
        loss: loss(model, batch), a scalar; default: the model's result or its attribute `loss`.
        draws: how often random operands are drawn, at least 3; more draws resolve a smaller drift.
        tokens: tokens of each layer that are kept and measured.
        dtype: the dtype of activations and gradients before they are quantized, as under autocast.
        progress: called with (what is being done, number done, total).

    Returns:
        A Report.

    Raises:
        Refused: there are no batches or policies, draws is below 3, or a policy quantizes no layer of the model.
        TypeError: the loss is not a scalar.
    """
    if draws < 3:
        raise Refused(f"draws is {draws}; accepted: 3 or more, which noise and drift need")
    batches = list(batches)
    chosen = [known.get(policy) for policy in policies]
    if not chosen:
        raise Refused(f"policies is empty; accepted: one or more of {', '.join(known.names())}")
    report = Report(
        facts={"draws": draws, "tokens": tokens, "batches": len(batches), "dtype": str(dtype).split(".")[-1]}
    )
    names: dict[str, list[str]] = {}
    for policy in chosen:
        with under(model, policy) as converted:
            taken = {n: module for n, module in layers_of(model).items() if module in converted.converted}
            names[policy.name] = [n for n, module in taken.items() if policy.recipe("pretrain", module).quantizes]
            report.left[policy.name] = converted.left
        if not names[policy.name] and policy.quantizes:
            raise Refused(nothing_converted(converted))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _audit(report, model, batches, chosen, names, loss, draws, tokens, dtype, progress)
    return report


def _audit(
    report: Report,
    model: nn.Module,
    batches: list,
    chosen: list[Policy],
    names: dict[str, list[str]],
    loss: Loss,
    draws: int,
    tokens: int,
    dtype: torch.dtype,
    progress: Callable[[str, int, int], None],
) -> None:
    everything = list(dict.fromkeys(n for taken in names.values() for n in taken))
    progress("running the batches", 0, 1)
    layers = capture(model, batches, everything, loss, tokens, dtype)
    with plain(model):
        report.losses["bf16"] = mean_loss(model, batches, loss)
    for name, layer in layers.items():
        report.layers[name] = facts(layer)
    total = sum(len(taken) for taken in names.values())
    done = 0
    for policy in chosen:
        rows = report.rows.setdefault(policy.name, [])
        for name in names[policy.name]:
            progress(f"{policy.name}: {name}", done, total)
            done += 1
            if name in layers:
                rows += judge(layers[name], policy.recipe("pretrain", layers[name].module), draws)
        with under(model, policy):
            report.losses[policy.name] = mean_loss(model, batches, loss)
            report.ratios[policy.name] = _ratios(model, batches[0], loss)
    progress("done", total, total)


def facts(layer: Layer) -> dict:
    """The facts of a layer's tensors that do not depend on a policy."""
    return {
        "shape": tuple(layer.w.shape),
        "tokens": layer.tokens,
        "amax": {**layer.amax, "w": layer.w.abs().max().item()},
        "non_finite": layer.non_finite,
        "outlier_channels": layer.outlier_channels()[:8],
        "outlier_channels_total": len(layer.outlier_channels()),
    }


def _ratios(model: nn.Module, batch: object, loss: Loss) -> dict[str, float]:
    """Layer → ‖g‖/‖noise‖; empty if the policy quantizes no layer."""
    if not any(w.requires_grad for w in weights(model).values()):
        return {}
    with torch.enable_grad():
        ratios = gradient_noise(model, lambda: loss(model, batch), warn=False)
    return {name: ratio for name, ratio in ratios.items() if not math.isnan(ratio)}
