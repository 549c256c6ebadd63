"""Live statistics: what the quantizers do every N steps of training, with warnings that say what would help.

    policy = fp4ext.policies.get("end_to_end").log_stats(every=50)
    fp4ext.convert(model, policy)
    monitor = fp4ext.audit.Monitor(model)
    for step in range(steps):
        with monitor.watch(step, lambda: loss_of(batch)):
            loss_of(batch).backward()
        if monitor.line: print(monitor.line["warnings"])

On a watched step, hooks keep some rows of each layer's x and dy; these and some rows of w are quantized once more and
counted. Other steps cost nothing, no random number is drawn from torch's generator, and the step's results do not
change. On the second watched step and every eighth after it, two more backward passes give the √3 ratio (fp4ext.noise).
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.quantization import quantize
from ..nn.dense import Linear
from ..nn.noise import SQRT3, gradient_noise, weights
from ..policy.spec import Spec
from ..policy.stages import current_stage
from .capture import layers_of, watched
from .operand import Tally, range_faults
from .report import SATURATION, UNDERFLOW

ROWS, TILE = 128, 16  # rows of each tensor that are quantized; at least a tile of each expert
NOISE_EVERY = 8  # watched steps between two measurements of the √3 ratio
WINDOW, FLIPS, OSCILLATING = 8, 3, 0.05  # watched steps to remember, changes of a code in them, share of weights


class Monitor:
    """Watches the converted layers of a model.

    Args:
        model: a model with layers that fp4ext.convert made.
        every: watch every that many steps; default: as the policy says (Policy.log_stats), else never.

    Attributes:
        layers: layer that quantizes → its module; the experts of a mixture are two layers (capture.layers_of).
        line: {"stats": {layer: {"x": {…}, "w": {…}, "dy": {…}, "ratio": …}}, "warnings": […]} after a watched step,
            None after any other. metrics.jsonl holds these lines.
    """

    def __init__(self, model: nn.Module, every: int | None = None):
        self.model = model
        modules = dict(model.named_modules())
        owners = {name: modules[owner] for name, owner in layers_of(model).items()}
        self.layers = {name: m for name, m in owners.items() if any(r.quantizes for r in m.recipes.values())}
        self.every = every or max((m.policy.stats_every for m in self.layers.values()), default=0)
        self.line: dict | None = None
        self._seen = 0
        self._codes: dict[str, deque[Tensor]] = {name: deque(maxlen=WINDOW) for name in self.layers}

    @contextmanager
    def watch(self, step: int, loss: Callable[[], Tensor] | None = None) -> Iterator[None]:
        """Around the forward and backward of a step.

        Args:
            step: the step's number from 0; multiples of `every` are watched.
            loss: computes the loss of this batch again, for the √3 ratio; without it there is no ratio.
        """
        self.line = None
        if not self.every or step % self.every:
            yield
            return
        kept: dict[str, dict[str, Tensor]] = {name: {} for name in self.layers}
        with ExitStack() as hooks:
            for name, module in self.layers.items():
                hooks.enter_context(_kept(module, name, kept))
            yield
        with torch.no_grad():
            stats = {name: self._layer(name, kept[name]) for name in self.layers}
        if loss is not None and self._seen % NOISE_EVERY == 1:
            for name, ratio in self._ratios(loss).items():
                stats[name]["ratio"] = ratio
        self._seen += 1
        self.line = {"stats": stats, "warnings": warnings_of(stats, step + 1)}

    def _layer(self, name: str, kept: dict[str, Tensor]) -> dict:
        module = self.layers[name]
        recipe = module.recipes[current_stage()]
        ends = kept.get("offsets")
        w = module.weight if isinstance(module, Linear) else module.stack(name.rpartition(".")[2])
        out = {}
        for role, spec, t in (
            ("x", recipe.fprop.x, kept.get("x")),
            ("w", recipe.fprop.w, w.detach()),
            ("dy", recipe.dgrad.dy, kept.get("dy")),
        ):
            if spec is None or t is None or not t.numel():
                continue
            parts = list(t) if t.dim() == 3 else [t] if ends is None else [*t.tensor_split(ends[:-1].tolist())]
            out[role], codes = look(parts, spec, role)
            if role == "w" and codes is not None:
                self._codes[name].append(codes)
                out[role]["oscillating"] = oscillating(list(self._codes[name]))
        return out

    def _ratios(self, loss: Callable[[], Tensor]) -> dict[str, float]:
        if not any(w.requires_grad for w in weights(self.model).values()):
            return {}
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            ratios = gradient_noise(self.model, loss, warn=False)
        return {name: ratio for name, ratio in ratios.items() if math.isfinite(ratio)}


def look(parts: list[Tensor], spec: Spec, role: str) -> tuple[dict, Tensor | None]:
    """(the statistics of some rows, their codes if `role` is "w" and they are E2M1 without an RHT, else None).

    Args:
        parts: matrices [rows, K], one for each expert. Their outer scales are those of whole matrices, except with RHT.
    """
    parts = [t for t in parts if t.numel()]
    wanted = max(TILE, ROWS // len(parts))
    seen = [_rows(t, spec, role, wanted) for t in parts]
    tally = functools.reduce(Tally.__add__, (tally for _, tally, _ in seen))
    counts = tally.shares()
    histogram = {str(byte): n for byte, n in enumerate(counts.pop("histogram")) if n}
    counts["snr_db"] = -10 * math.log10(tally.mse) if tally.mse > 0 else None
    amaxes = [amax for amax, _, _ in seen]
    amax = max(amaxes) if all(map(math.isfinite, amaxes)) else None
    kept = [codes for _, _, codes in seen if codes is not None]
    codes = torch.cat(kept) if role == "w" and kept else None
    return {"amax": amax, **counts, "histogram": histogram}, codes


def _rows(t: Tensor, spec: Spec, role: str, wanted: int) -> tuple[float, Tally, Tensor | None]:
    """(the amax of a matrix, the counts of some of its rows, the codes of these rows)."""
    whole = t.abs().amax().float().cpu()
    rows = t[:: max(1, len(t) // wanted)][:wanted] if spec.block != "16x16" else t[:wanted]
    rows = rows.float().cpu()
    amax = whole if spec.group == "tensor" and spec.rht == "none" and torch.isfinite(whole) else None
    rng = torch.tensor([0x5EED, 0])
    q = quantize(rows, spec, rng=rng, role=role, amax=amax)
    codes = q.codes.view(torch.uint8) if q.codes.dtype == torch.uint8 and spec.rht == "none" else None
    return whole.item(), range_faults(q, spec, rows, rng), codes


def oscillating(codes: list[Tensor]) -> float:
    """The share of weights whose code changed at least FLIPS times in the window and ends as it began."""
    if len(codes) < WINDOW:
        return 0.0
    stack = torch.stack([torch.stack((c & 15, c >> 4)) for c in codes])
    flips = (stack[1:] != stack[:-1]).sum(0)
    return ((flips >= FLIPS) & (stack[0] == stack[-1])).float().mean().item()


def warnings_of(stats: dict, step: int) -> list[str]:
    """The findings that call for action, a sentence each."""
    found = []
    for name, layer in stats.items():
        for role, c in layer.items():
            if role == "ratio":
                continue
            place = f"step {step}, {name}, {role}"
            if c["non_finite"]:
                found.append(f"{place}: {c['non_finite']:.1%} of the blocks are not finite; lower the learning rate")
            if c["underflow"] > UNDERFLOW:
                found.append(
                    f"{place}: {c['underflow']:.1%} of the blocks underflow to zero; try outer='row', or MXFP8 there"
                )
            if c["saturation"] > SATURATION:
                found.append(f"{place}: {c['saturation']:.1%} of the blocks saturate; use a scale rule that rounds up")
            if c.get("oscillating", 0.0) > OSCILLATING:
                found.append(
                    f"{place}: {c['oscillating']:.1%} of the weights flip between two codes; lower the learning rate, "
                    "or leave this layer in more bits"
                )
    under = {name: s["ratio"] for name, s in stats.items() if s.get("ratio", math.inf) < SQRT3}
    if under:
        worst = min(under, key=lambda name: under[name])
        found.append(
            f"step {step}: rounding noise outweighs the gradient (under √3) in {len(under)} of {len(stats)} layers, "
            f"most in {worst} ({under[worst]:.2f}); a larger batch or more bits in the backward would help"
        )
    return found


@contextmanager
def _kept(module: nn.Module, name: str, kept: dict[str, dict[str, Tensor]]) -> Iterator[None]:
    """Keep a layer's x and dy inside the block."""

    def keep(layer: str, x: Tensor, y: Tensor, offsets: Tensor | None = None) -> None:
        seen = kept[layer]
        seen["x"] = x.detach().flatten(0, -2)
        if offsets is not None:
            seen["offsets"] = offsets.cpu()
            seen["x"] = seen["x"][: int(offsets[-1])]
        if y.requires_grad:
            rows = len(seen["x"])
            y.register_hook(lambda g: seen.__setitem__("dy", g.detach().flatten(0, -2)[:rows]))

    if isinstance(module, Linear):
        hook = module.register_forward_hook(lambda m, args, y: keep(name, args[0], y))
        try:
            yield
        finally:
            hook.remove()
    elif "product" in vars(module):  # the other layer of these experts watches both
        yield
    else:
        experts: Any = module
        prefix = name.removesuffix(experts.stacks[0])
        watched(experts, lambda stack, x, offsets, y: keep(prefix + stack, x, y, offsets))
        try:
            yield
        finally:
            del experts.product
