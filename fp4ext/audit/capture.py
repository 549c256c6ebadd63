"""capture: record the input x [T, K] and output gradient dy [T, N] of each layer while the plain model runs on batches.

All policies are then measured on the same tensors, and a layer that quantizes badly does not change the tensors of
other layers.

The experts of a mixture are two layers, one per stack of weights, named after the parameter: "mlp.experts.down_proj".
Their rows stay sorted by expert.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..conversion.decision import Filter
from ..conversion.in_place import Report as Converted
from ..conversion.in_place import convert, restored
from ..conversion.names import named_modules
from ..errors import Refused
from ..nn import transformers_experts
from ..nn.dense import Linear, linear
from ..nn.experts import grouped_linear
from ..nn.noise import is_mixture
from ..policy.policy import Policy
from ..policy.recipe import Recipe
from ..policy.stages import STAGES

Loss = Callable[[nn.Module, object], Tensor]
MANY = 8  # a layer of experts keeps min(MANY, experts) times as many tokens as a linear layer


@dataclass
class Layer:
    """The tensors of one linear layer, or of one of the two layers of experts.

    Attributes:
        name: the layer's name. module: the name of its module, by which a policy chooses.
        x, dy: sampled tokens of all batches, [T, K] and [T, N]: fp32 on the CPU, whatever the model's device, with
            values rounded to `dtype` as under autocast.
        w: the weight [N, K], or a stack of experts [E, N, K]; fp32 on the CPU.
        offsets: int32 [E], the ends of the experts' rows in x and dy; None for a linear layer.
        tokens: the number of rows in all batches, before sampling.
        channels: the largest magnitude in each channel of x over all tokens, [K].
        amax: "x" and "dy" → the largest magnitude in each batch.
        non_finite: "x" and "dy" → the number of values in all batches that are not finite.
    """

    name: str
    module: str
    w: Tensor
    offsets: Tensor | None = None
    x: Tensor = field(default_factory=lambda: torch.empty(0))
    dy: Tensor = field(default_factory=lambda: torch.empty(0))
    tokens: int = 0
    channels: Tensor | None = None
    amax: dict[str, list[float]] = field(default_factory=lambda: {"x": [], "dy": []})
    non_finite: dict[str, int] = field(default_factory=lambda: {"x": 0, "dy": 0})
    parts: dict[str, list[Tensor]] = field(default_factory=lambda: {"x": [], "dy": [], "expert": []})

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.w.shape[-2], self.w.shape[-1]

    @property
    def experts(self) -> int:
        """The number of weight matrices."""
        return 1 if self.offsets is None else len(self.w)

    def each(self, t: Tensor) -> list[Tensor]:
        """x, dy or w split by expert, as each part is quantized on its own; whole for a linear layer."""
        if self.offsets is None:
            return [t]
        if t.dim() == 3:
            return list(t)
        return list(t.tensor_split(self.offsets[:-1].tolist()))

    def product(self, x: Tensor, w: Tensor, recipe: Recipe) -> Tensor:
        """y [T, N], computed by the layer's own code under `recipe`."""
        if self.offsets is None:
            return linear(x, w, None, recipe)
        return grouped_linear(x, w, self.offsets, recipe)

    def outlier_channels(self, times: float = 20.0) -> list[tuple[int, float]]:
        """(channel of x, its amax relative to the median channel's), for ratios above `times`, largest first."""
        if self.channels is None or not self.channels.numel():
            return []
        ratio = self.channels / self.channels.median().clamp_min(1e-30)
        found = (ratio > times).nonzero().flatten().tolist()
        return sorted(((i, ratio[i].item()) for i in found), key=lambda pair: -pair[1])


@contextmanager
def under(model: nn.Module, policy: Policy | str, filter: Filter | None = None) -> Iterator[Converted]:
    """Convert the model by a policy inside the block; afterwards every module is as before."""
    with restored(model.modules()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # callers check for themselves whether anything was converted
        yield convert(model, policy, filter)


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Quantize nothing in the model inside the block."""
    before: list[tuple[Any, dict]] = [
        (m, r) for m in model.modules() if isinstance(r := getattr(m, "recipes", None), dict)
    ]
    try:
        for module, _ in before:
            module.recipes = dict.fromkeys(STAGES, Recipe())
        yield
    finally:
        for module, recipes in before:
            module.recipes = recipes


@contextmanager
def bare(model: nn.Module) -> Iterator[None]:
    """Quantize nothing in the model inside the block, and convert its experts so that `watched` works on them."""
    with restored(model.modules()), plain(model):
        for name, module in named_modules(model):
            if transformers_experts.is_stacked(module) and transformers_experts.why_not(module) is None:
                transformers_experts.swap(module)
                stacked: Any = module  # of another class now
                stacked.set_policy("bf16", name)
        yield


def layers_of(model: nn.Module) -> dict[str, str]:
    """Layer → module of all layers of a converted model; the experts of a mixture are two layers."""
    found = {}
    for name, module in named_modules(model):
        if type(module) is Linear:
            found[name] = name
        elif is_mixture(module):
            mixture: Any = module
            found |= {joined(name, stack): name for stack in mixture.stacks}
    return found


def joined(module: str, stack: str) -> str:
    """The name of a layer of experts."""
    return f"{module}.{stack}" if module else stack


def watched(module: Any, see: Callable[[str, Tensor, Tensor, Tensor], None]) -> None:
    """Call `see` after each product of experts, until `under` or the caller deletes the module's attribute `product`.

    Args:
        module: Experts, or experts of transformers that Stacked is mixed into.
        see: called with the stack's name, x [T, K], offsets int32 [E], and y [T, N].
    """
    own = module.product

    def product(x: Tensor, name: str, offsets: Tensor) -> Tensor:
        y = own(x, name, offsets)
        see(name, x, offsets, y)
        return y

    module.product = product


def loss_of(model: nn.Module, batch: object) -> Tensor:
    """The loss of a batch: the model's result or its attribute `loss`. A batch is a tuple or dict of arguments.

    Raises:
        TypeError: the loss is not a scalar.
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
    """The mean loss over `batches` in the model's current state."""
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
        model: the model; the gradients of its parameters do not change.
        batches: tuples or dicts that `loss` takes.
        tokens: the number of tokens to keep of each linear layer, spread evenly over the batches; up to MANY times as
            many are kept of experts.
        dtype: the dtype to which x and dy are rounded.

    Raises:
        Refused: there is no batch.
    """
    batches = list(batches)
    if not batches:
        raise Refused("batches is empty; accepted: one or more batches")
    modules: dict[str, Any] = dict(named_modules(model))
    layers: dict[str, Layer] = {}
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
    return {name: layer for name, layer in layers.items() if _gather(layer)}


def _layer(modules: dict[str, Any], name: str) -> Layer:
    """The Layer of a bare model, before any batch."""
    if name in modules:
        return Layer(name, name, modules[name].weight.detach().float().cpu())
    owner, _, stack = name.rpartition(".")
    w = modules[owner].stack(stack).detach().float().cpu()
    return Layer(name, owner, w, torch.zeros(len(w), dtype=torch.int32))


def _gather(layer: Layer) -> bool:
    """Join what was kept of all batches, sorted by expert. Whether any was."""
    parts = {role: torch.cat(kept) for role, kept in layer.parts.items() if kept}
    layer.parts.clear()
    if "x" not in parts:
        return False
    order = torch.arange(len(parts["x"]))
    if layer.offsets is not None:
        order = parts["expert"].argsort(stable=True)
        layer.offsets = parts["expert"].bincount(minlength=layer.experts).cumsum(0).to(torch.int32)
    layer.x, layer.dy = parts["x"][order], parts["dy"][order]
    return True


@dataclass
class _Look:
    """Keeps `share` rows of x and dy per batch, and updates the statistics over all rows."""

    share: int
    dtype: torch.dtype
    generator: torch.Generator

    def at(self, layer: Layer) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        """The forward hook of a linear layer."""
        return lambda module, args, output: self._see(layer, args[0].detach().flatten(0, -2), output)

    def at_experts(self, layers: dict[str, Layer | None]) -> Callable[[str, Tensor, Tensor, Tensor], None]:
        """The function that `watched` calls, by the stacks' names."""

        def see(name: str, x: Tensor, offsets: Tensor, y: Tensor) -> None:
            layer = layers[name]
            if layer is not None:
                self._see(layer, x.detach()[: int(offsets[-1])], y, offsets)

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

        def backward(gradient: Tensor) -> None:
            gradient = gradient.detach().flatten(0, -2)[: len(rows)]
            _count(layer, "dy", gradient)
            layer.parts["dy"][place] = gradient[keep].to(self.dtype).float().cpu()

        if output.requires_grad:
            output.register_hook(backward)


def _count(layer: Layer, role: str, t: Tensor) -> Tensor:
    """Update amax and non_finite; return the magnitudes, 0 where not finite."""
    finite = torch.isfinite(t)
    layer.non_finite[role] += int((~finite).sum())
    magnitude = t.float().abs().where(finite, 0)
    layer.amax[role][-1] = max(layer.amax[role][-1], magnitude.max().item() if t.numel() else 0.0)
    return magnitude
