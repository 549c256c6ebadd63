"""capture: what each linear layer reads and is told, on some batches: x [T, K] and dy [T, N], in plain arithmetic.

All policies are then judged on the same tensors, and a layer that quantizes badly can't spoil what its neighbours see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..convert import Report as Converted
from ..convert import convert
from ..linear import Linear
from ..policy import STAGES, Policy
from ..recipe import Recipe

Loss = Callable[[nn.Module, object], Tensor]


@dataclass
class Layer:
    """What one linear layer saw.

    Attributes:
        name: of the module.
        x, dy: sampled tokens of all batches, [T, K] and [T, N], rounded to `dtype` as autocast does; fp32 on the CPU,
            where they are judged, whatever the model's device.
        w: the weight [N, K], fp32.
        tokens: how many tokens a batch brought, before sampling.
        channels: largest magnitude of each channel of x, over all tokens.
        amax: for "x" and "dy", the largest magnitude in each batch.
        non_finite: for "x" and "dy", how many values of all batches were not finite.
    """

    name: str
    w: Tensor
    x: Tensor | None = None
    dy: Tensor | None = None
    tokens: int = 0
    channels: Tensor | None = None
    amax: dict[str, list[float]] = field(default_factory=lambda: {"x": [], "dy": []})
    non_finite: dict[str, int] = field(default_factory=lambda: {"x": 0, "dy": 0})
    parts: dict[str, list[Tensor]] = field(default_factory=lambda: {"x": [], "dy": []})

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return tuple(self.w.shape)

    def outlier_channels(self, times: float = 20.0) -> list[tuple[int, float]]:
        """(channel of x, its amax over the median channel's) of those beyond `times` it, largest first."""
        if self.channels is None or not self.channels.numel():
            return []
        ratio = self.channels / self.channels.median().clamp_min(1e-30)
        found = (ratio > times).nonzero().flatten().tolist()
        return sorted(((i, ratio[i].item()) for i in found), key=lambda pair: -pair[1])


@contextmanager
def under(model: nn.Module, policy: Policy | str) -> Iterator[Converted]:
    """The model converted by a policy, for a time; afterwards every module is what it was."""
    before = [(m, m.__class__, dict(m.__dict__)) for m in model.modules()]
    try:
        yield convert(model, policy)
    finally:
        for module, kind, attributes in before:
            module.__class__ = kind
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """The model with nothing quantized, for a time."""
    before = [(m, m.recipes) for m in model.modules() if isinstance(getattr(m, "recipes", None), dict)]
    try:
        for module, _ in before:
            module.recipes = dict.fromkeys(STAGES, Recipe())
        yield
    finally:
        for module, recipes in before:
            module.recipes = recipes


def linears(model: nn.Module) -> list[str]:
    """The names of the linear layers that quantize; stacked experts do so too, but are not audited."""
    return [name for name, module in model.named_modules() if type(module) is Linear]


def loss_of(model: nn.Module, batch) -> Tensor:
    """The loss of a batch: what the model returns, or its `.loss`. A batch is a tuple or a dict of arguments.

    Raises:
        TypeError: that is no scalar.
    """
    arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
    out = model(**batch) if isinstance(batch, dict) else model(*arguments)
    out = getattr(out, "loss", out)
    if not isinstance(out, Tensor) or out.dim():
        raise TypeError(
            f"the model returns {type(out).__name__} for a batch; accepted: a scalar loss, an object with .loss, "
            "or your own loss=lambda model, batch: …"
        )
    return out


def capture(
    model: nn.Module,
    batches: Iterable,
    names: Iterable[str],
    loss: Loss = loss_of,
    tokens: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> dict[str, Layer]:
    """Run the batches through the plain model, forward and backward; name → Layer of each of `names`.

    Args:
        model: its parameters' gradients are not touched.
        batches: each a tuple or dict that `loss` understands.
        tokens: kept of each layer, spread evenly over the batches.

    Raises:
        ValueError: no batch.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("batches is empty; accepted: one or more batches")
    modules = dict(model.named_modules())
    layers = {name: Layer(name, modules[name].weight.detach().float().cpu()) for name in names}
    share = max(1, tokens // len(batches))
    generator = torch.Generator().manual_seed(seed)
    hooks = [
        modules[name].register_forward_hook(_watch(layer, share, dtype, generator)) for name, layer in layers.items()
    ]
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        with plain(model), torch.enable_grad():
            for batch in batches:
                for layer in layers.values():
                    layer.amax["x"].append(0.0)
                    layer.amax["dy"].append(0.0)
                torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers.values():
        layer.x, layer.dy = (torch.cat(layer.parts[role]) if layer.parts[role] else None for role in ("x", "dy"))
        layer.parts.clear()
    return {name: layer for name, layer in layers.items() if layer.x is not None}


def _watch(layer: Layer, share: int, dtype: torch.dtype, generator: torch.Generator):
    def see(role: str, t: Tensor) -> Tensor:
        t = t.detach().flatten(0, -2)
        finite = torch.isfinite(t)
        layer.non_finite[role] += int((~finite).sum())
        magnitude = t.float().abs().where(finite, 0)
        layer.amax[role][-1] = max(layer.amax[role][-1], magnitude.max().item() if t.numel() else 0.0)
        return magnitude

    def hook(module, args, output):
        x = args[0]
        magnitude = see("x", x)
        channels = magnitude.amax(0) if len(magnitude) else magnitude.new_zeros(magnitude.shape[-1])
        channels = channels.cpu()
        layer.channels = channels if layer.channels is None else torch.maximum(layer.channels, channels)
        rows = x.detach().flatten(0, -2)
        layer.tokens += len(rows)
        keep = torch.randperm(len(rows), generator=generator)[:share].sort().values
        layer.parts["x"].append(rows[keep].to(dtype).float().cpu())
        place = len(layer.parts["x"]) - 1
        layer.parts["dy"].append(torch.zeros(len(keep), output.shape[-1]))  # where no gradient comes back

        def backward(gradient):
            see("dy", gradient)
            layer.parts["dy"][place] = gradient.detach().flatten(0, -2)[keep].to(dtype).float().cpu()

        if output.requires_grad:
            output.register_hook(backward)

    return hook
