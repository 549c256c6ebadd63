"""measure: a model's layers on real batches, under one or more policies."""

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
    """Measure what policies do to a model, layer by layer and operand by operand.

    Args:
        model: plain or converted; afterwards it is what it was.
        batches: a few, each a tuple or dict of the model's arguments for which it returns a loss.
        policies: names, or Policies of your own.
        loss: loss(model, batch), where the model does not return one.
        draws: of everything that is random; the floor of a drift is resolved to about 1/draws of the noise's own
            sampling error.
        tokens: of each layer that are kept and measured.
        dtype: of activations and gradients where they are quantized: what autocast would make of them.
        progress: called with (what is being done, done, of how many).

    Returns:
        A Report.

    Raises:
        Refused: no batches, no policies, draws under 3, a policy that takes no layer of this model.
        TypeError: the loss is no scalar.
    """
    if draws < 3:
        raise Refused(f"draws is {draws}; accepted: from 3, to tell noise from drift")
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
    everything = list(dict.fromkeys(n for taken in names.values() for n in taken))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _audit(report, model, batches, chosen, names, everything, loss, draws, tokens, dtype, progress)
    return report


def _audit(report, model, batches, chosen, names, everything, loss, draws, tokens, dtype, progress) -> None:
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
    """What the report says of a layer's tensors, whatever the policy."""
    return {
        "shape": tuple(layer.w.shape),
        "tokens": layer.tokens,
        "amax": {**layer.amax, "w": layer.w.abs().max().item()},
        "non_finite": layer.non_finite,
        "outlier_channels": layer.outlier_channels()[:8],
        "outlier_channels_total": len(layer.outlier_channels()),
    }


def _ratios(model: nn.Module, batch, loss: Loss) -> dict[str, float]:
    """‖g‖/‖noise‖ by layer; none where the policy took no layer."""
    if not any(w.requires_grad for w in weights(model).values()):
        return {}
    with torch.enable_grad():
        ratios = gradient_noise(model, lambda: loss(model, batch), warn=False)
    return {name: ratio for name, ratio in ratios.items() if not math.isnan(ratio)}
