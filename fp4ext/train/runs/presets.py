"""Sizes and schedules of the reference runs. Data only.

A run's config.json repeats these values, so a preset may change freely. Parameters, embeddings aside:
layers · (4 d² + 3 d·ffn + experts · 3 d·expert_ffn), of which a token meets layers · (4 d² + 3 d·ffn + top_k · 3
d·expert_ffn). One step costs 6 · those that a token meets · batch · context operations.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from fp4ext.errors import Refused

from . import typed
from .checkpoint import MOST


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer. Widths of whole blocks (32) need no padding.

    Attributes:
        ffn: the inner width of SwiGLU; beside experts, that of the shared expert (0: there is none).
        experts, top_k, expert_ffn: routed experts a layer, how many of them a token meets, and their inner width; 0
            for a dense model.
    """

    layers: int
    d: int
    heads: int
    ffn: int
    context: int
    vocab: int = 256  # bytes
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0

    def __post_init__(self):
        for name in ("layers", "d", "heads", "context", "vocab"):
            whole(f"shape.{name}", getattr(self, name))
        whole("shape.ffn", self.ffn, least=0 if self.experts else 1)
        whole("shape.experts", self.experts, least=0)
        for name, most in {"top_k": self.experts, "expert_ffn": 2**31 - 1}.items():
            least, most = (1, most) if self.experts else (0, 0)
            whole(f"shape.{name}", getattr(self, name), least, most)
        if self.d % (2 * self.heads):
            raise Refused(
                f"shape.d: {self.d} with {self.heads} heads; accepted: a multiple of 2 · heads, {2 * self.heads}"
            )

        if self.experts:
            for name in ("experts", "top_k", "expert_ffn"):
                whole(f"shape.{name}", getattr(self, name))
            whole("shape.top_k", self.top_k, 1, self.experts)

    @property
    def head_dim(self) -> int:
        return self.d // self.heads


@dataclass(frozen=True)
class Preset:
    """One reference run: a model and the schedule that trains it.

    Attributes:
        model: "transformer", ours (model.py), or "inkling2", transformers' (inkling2.py).
        batch: sequences a step.
        lr, min_lr: learning rate after `warmup` steps, and at the last step (cosine between them).
        log_every, eval_every, save_every: in steps.
        eval_windows, final_windows: validation sequences used by each evaluation along the way, and by the last one.
    """

    name: str
    shape: Shape
    steps: int
    batch: int
    lr: float
    min_lr: float
    warmup: int
    weight_decay: float = 0.1
    clip: float = 1.0
    log_every: int = 5
    eval_every: int = 25
    save_every: int = 50
    eval_windows: int = 128
    final_windows: int = 1024
    model: str = "transformer"

    def __post_init__(self):
        if self.model not in ("transformer", "inkling2"):
            raise Refused(f"model: {self.model!r}; accepted: transformer, inkling2")
        if self.model == "inkling2" and (self.shape.ffn or not self.shape.experts):
            raise Refused("shape: an inkling2 has experts, and none that is shared; accepted: experts, and ffn=0")
        counts = ("steps", "batch", "warmup", "log_every", "eval_every", "save_every", "eval_windows", "final_windows")
        for name in counts:
            whole(name, getattr(self, name), most=MOST if name == "steps" else 2**31 - 1)
        for name in ("lr", "min_lr", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise Refused(f"{name}: {getattr(self, name)!r}; accepted: a number from 0")

    def with_(self, **changes) -> Preset:
        """A copy with some values changed."""
        return replace(self, **changes)


def from_dict(values, where: str) -> Preset:
    """The preset of a config.json. Raises Refused for what is none, by its name."""
    shape = typed.check(Preset, values, where).get("shape")
    return typed.make(Preset, values, where, shape=typed.make(Shape, shape, f"{where}.shape"))


def as_dict(preset: Preset) -> dict:
    """As config.json has it: a dense model's says nothing of experts, and ours nothing of a model."""
    values = asdict(preset)
    if preset.model == "transformer":
        del values["model"]
    if not preset.shape.experts:
        for name in ("experts", "top_k", "expert_ffn"):
            del values["shape"][name]
    return values


def whole(name: str, value: int, least: int = 1, most: int = 2**31 - 1) -> int:
    """The value, if it is a whole number in [least, most]. Raises Refused otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Refused(f"{name}: {value!r}; accepted: a whole number from {least} to {most}")
    return value


# A rate at which what parts two arms is their arithmetic, not chance (docs/log.md, "600 steps, three seeds").
TINY = Preset(
    "tiny",
    Shape(layers=4, d=128, heads=4, ffn=352, context=128),
    steps=600,
    batch=16,
    lr=5e-4,
    min_lr=2e-5,
    warmup=100,
    eval_every=50,
)
SMALL = Preset(
    "small",
    Shape(layers=8, d=320, heads=5, ffn=864, context=256),
    steps=2000,
    batch=16,
    lr=2e-3,
    min_lr=2e-4,
    warmup=100,
    log_every=10,
    eval_every=100,
    save_every=100,
)

TASK = Preset(
    "task",
    Shape(layers=2, d=64, heads=2, ffn=192, context=48),
    steps=600,
    batch=32,
    lr=4e-3,
    min_lr=2e-4,
    warmup=20,
    eval_every=100,
    save_every=100,
    eval_windows=64,
    final_windows=128,
)

MOE = Shape(layers=4, d=128, heads=4, ffn=96, context=128, experts=8, top_k=2, expert_ffn=64)
MOE_TINY = TINY.with_(name="moe-tiny", shape=MOE, steps=240, lr=2e-3, warmup=20, eval_every=25)
MOE_TASK = TASK.with_(
    name="moe-task",
    shape=replace(TASK.shape, ffn=64, experts=8, top_k=2, expert_ffn=64),
    steps=300,
    eval_every=50,
    save_every=50,
)

INKLING2_TINY = MOE_TINY.with_(
    name="inkling2-tiny",
    model="inkling2",
    shape=Shape(layers=6, d=128, heads=4, ffn=0, context=128, experts=16, top_k=2, expert_ffn=64),
    batch=8,
    steps=120,
    eval_windows=32,
    final_windows=128,
)

PRESETS = {p.name: p for p in (TINY, SMALL, MOE_TINY, TASK, MOE_TASK, INKLING2_TINY)}


def get(name: str | Preset) -> Preset:
    """The preset of that name. Raises Refused, listing the names there are."""
    if isinstance(name, Preset):
        return name
    if name not in PRESETS:
        raise Refused(f"unknown preset {name!r}; presets: {', '.join(PRESETS)}")
    return PRESETS[name]
