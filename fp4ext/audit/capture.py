"""capture: what each layer reads and is told, on some batches: x [T, K] and dy [T, N], in plain arithmetic.

All policies are then judged on the same tensors, and a layer that quantizes badly can't spoil what its neighbours see.

The experts of a mixture are two layers, one a stack of weights, by the name of the parameter: "mlp.experts.down_proj".
Their rows stay sorted by expert.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..conversion.decision import Filter
from ..conversion.in_place import Report as Converted
from ..conversion.in_place import convert, restored
from ..conversion.names import named_modules
from ..errors import Refused
from ..nn import transformers_experts
from ..nn.dense import Linear, linear
from ..nn.experts import Experts, grouped_linear
from ..nn.noise import is_mixture
from ..policy.policy import Policy
from ..policy.recipe import Recipe
from ..policy.stages import STAGES

Loss = Callable[[nn.Module, object], Tensor]
MANY = 8  # times the tokens kept of a linear layer are kept of a layer of so many experts or more


@dataclass
class Layer:
    """What one linear layer, or one of the two layers that experts are, saw.

    Attributes:
        name: of the layer. module: of the module that it belongs to, by which a policy chooses.
        x, dy: sampled tokens of all batches, [T, K] and [T, N], rounded to `dtype` as autocast does; fp32 on the CPU,
            where they are judged, whatever the model's device.
        w: the weight [N, K], or a stack of experts' [E, N, K], fp32.
        offsets: int32 [E], the ends of the experts' rows in x and dy; None for a linear layer.
        tokens: how many rows the batches brought, before sampling.
        channels: largest magnitude of each channel of x, over all tokens.
        amax: for "x" and "dy", the largest magnitude in each batch.
        non_finite: for "x" and "dy", how many values of all batches were not finite.
    """

    name: str
    module: str
    w: Tensor
    offsets: Tensor | None = None
    x: Tensor | None = None
    dy: Tensor | None = None
    tokens: int = 0
    channels: Tensor | None = None
    amax: dict[str, list[float]] = field(default_factory=lambda: {"x": [], "dy": []})
    non_finite: dict[str, int] = field(default_factory=lambda: {"x": 0, "dy": 0})
    parts: dict[str, list[Tensor]] = field(default_factory=lambda: {"x": [], "dy": [], "expert": []})

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return tuple(self.w.shape[-2:])

    @property
    def experts(self) -> int:
        """How many matrices it has."""
        return 1 if self.offsets is None else len(self.w)

    def each(self, t: Tensor) -> list[Tensor]:
        """Of x, dy or w the part of each expert, which is quantized by itself; all of it for a linear layer."""
        if self.offsets is None:
            return [t]
        if t.dim() == 3:
            return list(t)
        return list(t.tensor_split(self.offsets[:-1].tolist()))

    def product(self, x: Tensor, w: Tensor, recipe: Recipe) -> Tensor:
        """y by the layer's own code."""
        if self.offsets is None:
            return linear(x, w, None, recipe)
        return grouped_linear(x, w, self.offsets, recipe)

    def outlier_channels(self, times: float = 20.0) -> list[tuple[int, float]]:
        """(channel of x, its amax over the median channel's) of those beyond `times` it, largest first."""
        if self.channels is None or not self.channels.numel():
            return []
        ratio = self.channels / self.channels.median().clamp_min(1e-30)
        found = (ratio > times).nonzero().flatten().tolist()
        return sorted(((i, ratio[i].item()) for i in found), key=lambda pair: -pair[1])


@contextmanager
def under(model: nn.Module, policy: Policy | str, filter: Filter | None = None) -> Iterator[Converted]:
    """The model converted by a policy, for a time; afterwards every module is what it was."""
    with restored(model.modules()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # who calls it says where nothing is converted
        yield convert(model, policy, filter)


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


@contextmanager
def bare(model: nn.Module) -> Iterator[None]:
    """The model with nothing quantized, for a time, its experts such that their products can be watched."""
    with restored(model.modules()), plain(model):
        for name, module in named_modules(model):
            if transformers_experts.is_stacked(module) and transformers_experts.why_not(module) is None:
                transformers_experts.swap(module)
                module.set_policy("bf16", name)
        yield


def layers_of(model: nn.Module) -> dict[str, str]:
    """Layer → module of the layers that a converted model has; the experts of a mixture are two."""
    found = {}
    for name, module in named_modules(model):
        if type(module) is Linear:
            found[name] = name
        elif is_mixture(module):
            found |= {joined(name, stack): name for stack in module.stacks}
    return found


def joined(module: str, stack: str) -> str:
    """The name of a layer of experts."""
    return f"{module}.{stack}" if module else stack


def watched(module: Experts | transformers_experts.Stacked, see: Callable[[str, Tensor, Tensor, Tensor], None]) -> None:
    """Have `see` called with the stack's name, x [T, K], offsets and y [T, N] of each product of experts, until `under`
    or the caller takes the attribute `product` off the module again."""
    own = module.product

    def product(x: Tensor, name: str, offsets: Tensor) -> Tensor:
        y = own(x, name, offsets)
        see(name, x, offsets, y)
        return y

    module.product = product


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


@torch.no_grad()
def mean_loss(model: nn.Module, batches: list, loss: Loss) -> float:
    """Of the batches, as the model is now."""
    return sum(loss(model, batch).item() for batch in batches) / len(batches)


def capture(
    model: nn.Module,
    batches: Iterable,
    names: Iterable[str],
    loss: Loss = loss_of,
    tokens: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> dict[str, Layer]:
    """Run the batches through the plain model, forward and backward; name → Layer of each of `names` (layers_of).

    Args:
        model: its parameters' gradients are not touched.
        batches: each a tuple or dict that `loss` understands.
        tokens: kept of each linear layer, spread evenly over the batches; of experts more, as there are more of them.

    Raises:
        Refused: no batch.
    """
    batches = list(batches)
    if not batches:
        raise Refused("batches is empty; accepted: one or more batches")
    modules, layers = dict(named_modules(model)), {}
    share = max(1, tokens // len(batches))
    look = _Look(share, dtype, torch.Generator().manual_seed(seed))
    parameters = [p for p in model.parameters() if p.requires_grad]
    hooks = []
    try:
        with bare(model), torch.enable_grad():
            for name in names:
                layer = layers[name] = _layer(modules, name)
                if layer.offsets is None:
                    hooks.append(modules[name].register_forward_hook(look.at(layer)))
            for name in dict.fromkeys(layer.module for layer in layers.values() if layer.offsets is not None):
                mine = {stack: layers.get(joined(name, stack)) for stack in modules[name].stacks}
                watched(modules[name], look.at_experts(mine))
            for batch in batches:
                for layer in layers.values():
                    layer.amax["x"].append(0.0)
                    layer.amax["dy"].append(0.0)
                torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers.values():
        _gather(layer)
    return {name: layer for name, layer in layers.items() if layer.x is not None}


def _layer(modules: dict[str, nn.Module], name: str) -> Layer:
    """A layer of a bare model, nothing of it seen yet."""
    if name in modules:
        return Layer(name, name, modules[name].weight.detach().float().cpu())
    owner, _, stack = name.rpartition(".")
    w = modules[owner].stack(stack).detach().float().cpu()
    return Layer(name, owner, w, torch.zeros(len(w), dtype=torch.int32))


def _gather(layer: Layer) -> None:
    """What was kept of all batches, sorted by expert."""
    parts = {role: torch.cat(kept) for role, kept in layer.parts.items() if kept}
    layer.parts.clear()
    if "x" not in parts:
        return
    order = slice(None)
    if layer.offsets is not None:
        order = parts["expert"].argsort(stable=True)
        layer.offsets = parts["expert"].bincount(minlength=layer.experts).cumsum(0).to(torch.int32)
    layer.x, layer.dy = parts["x"][order], parts["dy"][order]


@dataclass
class _Look:
    """Keeps `share` rows of what layers read and are told in a batch, and counts over all of them."""

    share: int
    dtype: torch.dtype
    generator: torch.Generator

    def at(self, layer: Layer):
        """A forward hook of a linear layer."""
        return lambda module, args, output: self._see(layer, args[0].detach().flatten(0, -2), output)

    def at_experts(self, layers: dict[str, Layer | None]):
        """What `watched` calls."""

        def see(name: str, x: Tensor, offsets: Tensor, y: Tensor) -> None:
            if layers[name] is not None:
                self._see(layers[name], x.detach()[: int(offsets[-1])], y, offsets)

        return see

    def _see(self, layer: Layer, rows: Tensor, output: Tensor, offsets: Tensor | None = None) -> None:
        magnitude = _count(layer, "x", rows)
        channels = magnitude.amax(0) if len(rows) else magnitude.new_zeros(rows.shape[-1])
        channels = channels.cpu()
        layer.channels = channels if layer.channels is None else torch.maximum(layer.channels, channels)
        layer.tokens += len(rows)
        share = self.share * min(MANY, layer.experts)
        keep = torch.randperm(len(rows), generator=self.generator)[:share].sort().values
        if offsets is not None:
            layer.parts["expert"].append(torch.searchsorted(offsets.cpu(), keep.to(torch.int32), right=True))
        layer.parts["x"].append(rows[keep].to(self.dtype).float().cpu())
        place = len(layer.parts["x"]) - 1
        layer.parts["dy"].append(torch.zeros(len(keep), output.shape[-1]))  # where no gradient comes back

        def backward(gradient):
            gradient = gradient.detach().flatten(0, -2)[: len(rows)]
            _count(layer, "dy", gradient)
            layer.parts["dy"][place] = gradient[keep].to(self.dtype).float().cpu()

        if output.requires_grad:
            output.register_hook(backward)


def _count(layer: Layer, role: str, t: Tensor) -> Tensor:
    """Largest magnitude and what is not finite; the magnitudes."""
    finite = torch.isfinite(t)
    layer.non_finite[role] += int((~finite).sum())
    magnitude = t.float().abs().where(finite, 0)
    layer.amax[role][-1] = max(layer.amax[role][-1], magnitude.max().item() if t.numel() else 0.0)
    return magnitude
