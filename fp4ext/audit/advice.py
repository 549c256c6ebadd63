"""advise: rank formats and rules for each stage on a model's own tensors, and return the choice as a Policy.

The stages need different things, whatever the goal is (docs/audit.md):

    pretraining, forward    a low error, which makes most of the loss gap
    pretraining, backward   no drift, since noise averages out over tokens and steps; the goal decides among the rest
    RL sampler              as the forward, with an outer scale per row, which the other rows of a batch cannot change
    RL trainer              the sampler's operands, and a backward in BF16 on them, since any difference is off-policy

Candidates are measured (layer.py) and their time is estimated (cost_model.py). Candidates that are faulty in more than
a quarter of the layers rank after all others. A layer in which the chosen candidate is faulty stays in BF16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ..errors import Refused
from ..policy import policy_file
from ..policy.policy import Policy
from ..policy.recipe import Dgrad, Fprop, Recipe, Wgrad
from ..policy.spec import Spec
from .calibrate import Here
from .capture import Layer, Loss, capture, layers_of, loss_of, mean_loss, plain, under
from .cost_model import layer_seconds
from .layer import DRIFT, HAT, Row, judge
from .machines import Machine
from .operand import Measured
from .operations import Op, of_layer
from .report import found_in

Progress = Callable[[str, int, int], None]  # what is being done, done, of how many
GOALS = ("error", "bias", "speed", "memory")
FEW = 0.25  # a sound candidate is faulty in at most this share of the modules
NVFP4, TILE, MX = Spec("nvfp4"), Spec("nvfp4", block="16x16"), Spec("mxfp8")


def _fprop(key: str) -> Recipe:
    return Recipe(Fprop(Spec.parse(key), Spec.parse(key)))


def _both(fprop: Fprop, dy: Spec, w: Spec, x: Spec, from_fprop: bool, wgrad_dy: Spec | None = None) -> Recipe:
    return Recipe(fprop, Dgrad(dy, w, from_fprop), Wgrad(wgrad_dy or dy, x, from_fprop))


FORWARD = {
    "bf16": Recipe(),
    "mxfp8": _fprop("mxfp8"),
    "mxfp4": _fprop("mxfp4"),
    "amax": _fprop("nvfp4/amax"),
    "amax, w 16x16": Recipe(Fprop(NVFP4, TILE)),
    "four_over_six": _fprop("nvfp4/four_over_six"),
    "sweep": _fprop("nvfp4/sweep"),
}
SR, MINVAR = Spec("nvfp4", rounding="stochastic"), Spec("nvfp4", "minvar", "stochastic")
EDEN, EDEN2 = Spec("nvfp4", "amax", "eden", rht="128"), Spec("nvfp4", "sweep", "eden", rht="128x2")
BACKWARD: dict[str, Callable[[Fprop], Recipe]] = {
    "bf16": lambda f: Recipe(f),
    "mxfp8": lambda f: _both(f, MX, MX, MX, True),
    "nearest": lambda f: _both(f, NVFP4, NVFP4, NVFP4, True),
    "stochastic": lambda f: _both(f, SR, SR, SR, True),
    "stochastic minvar": lambda f: _both(f, MINVAR, MINVAR, MINVAR, True),
    "MS-EDEN, one stage": lambda f: _both(f, EDEN, EDEN, EDEN, True),
    "MS-EDEN + sweep, two stages": lambda f: _both(f, EDEN2, EDEN2, EDEN2, True),
}


@dataclass(frozen=True)
class Score:
    """The measurements of a candidate of a stage.

    Attributes:
        error: relative MSE of the products (y; or dx and dw) in one draw, mean over the modules without a fault, which
            alone would use the candidate; over all modules if all are faulty.
        drift: the mean floor of the same products, which no average removes; 0 for a forward.
        faults: module whose operands or products drift, saturate or underflow → the worst fault.
        seconds: time of the stage's GEMMs and quantizers in all measured layers, per token.
        bits: stored bits per element of weights (forward) or of activations saved for the backward.
        modules: the number of modules measured.
    """

    name: str
    error: float
    drift: float
    faults: dict[str, str]
    seconds: float
    bits: float
    modules: int = 1

    @property
    def sound(self) -> bool:
        """Whether at most the share FEW of the modules is faulty."""
        return len(self.faults) <= self.modules * FEW


@dataclass
class Advice:
    """A proposed policy and the reasons for it.

    Attributes:
        policy: the proposed Policy.
        why: key in the policy file → reason, with numbers.
        ranked: "forward" and "backward" → Scores, best first.
        goal, machine: the goal, and the name of the machine for which times were estimated.
        loss: mean loss on the batches of the plain model and under the policy, nats.
    """

    policy: Policy
    why: dict[str, str]
    ranked: dict[str, list[Score]] = field(default_factory=dict)
    goal: str = "error"
    machine: str = ""
    loss: tuple[float, float] = (0.0, 0.0)

    def text(self, form: str = "toml") -> str:
        """The policy file, as "toml" or "json"."""
        return policy_file.dumps(self.policy, self.why, form)


def advise(
    model: nn.Module,
    batches: Iterable,
    goal: str = "error",
    *,
    machine: Machine | Here,
    budget: float = 0.01,
    loss: Loss = loss_of,
    draws: int = 12,
    tokens: int = 256,
    most: int = 8,
    name: str = "advice",
    progress: Progress = lambda what, done, of: None,
) -> Advice:
    """Propose a policy for a model.

    Args:
        batches: tuples or dicts of the model's arguments, as `loss` takes them.
        goal: "error", "bias", "speed" or "memory"; it ranks the 4-bit candidates that are sound.
        machine: the machine for which times are estimated: machines.get, or calibrate's Here.
        budget: the allowed relative increase of the loss on the batches. While the increase is larger, the layer that
            costs most loss goes back to BF16.
        loss: loss(model, batch), a scalar.
        draws: how often each random operand is drawn.
        tokens: tokens of each layer that are kept and measured.
        most: the number of layers that are measured, spread over the model; the experts of a block are two layers.
        name: the name of the proposed policy.
        progress: called with (what is being done, number done, total).

    Raises:
        Refused: the goal is unknown, the budget is not above zero, there are no batches, or the model has no layer to
            convert.
        TypeError: the loss is not a scalar.
    """
    if goal not in GOALS:
        raise Refused(f"unknown goal {goal!r}; accepted: {', '.join(GOALS)}")
    if not budget > 0:
        raise Refused(f"budget is {budget}; accepted: a relative loss above 0, such as 0.01")
    batches = list(batches)
    with under(model, "end_to_end") as converted:
        names = {n: module for n, module in layers_of(model).items() if module in converted.converted}
    if not names:
        raise Refused("the model has no layer to convert; accepted: a model with nn.Linear layers or experts")
    step = max(1, -(-len(names) // most))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        progress("running the batches", 0, 1)
        layers = list(capture(model, batches, list(names)[::step], loss, tokens).values())
        forward = _scores(FORWARD, "fprop", layers, machine, draws, goal, progress)
        chosen = next(s for s in forward if s.name not in ("bf16", "mxfp8"))
        fprop = FORWARD[chosen.name].fprop
        candidates = {key: make(fprop) for key, make in BACKWARD.items()}
        backward = _scores(candidates, "backward", layers, machine, draws, goal, progress)
        back = next(s for s in backward if s.name not in ("bf16", "mxfp8"))
        advice = Advice(_policy(name, fprop, candidates[back.name]), {}, goal=goal, machine=machine.name)
        advice.ranked = {"forward": forward, "backward": backward}
        _reasons(advice, chosen, back)
        _exceptions(advice, chosen, back)
        _keep_budget(advice, model, batches, loss, list(dict.fromkeys(names.values())), budget, progress)
    return advice


def needed() -> list[Op]:
    """The operations of all candidates, for calibrate."""
    recipes = [*FORWARD.values(), *(make(f.fprop) for f in FORWARD.values() for make in BACKWARD.values())]
    return [op for recipe in recipes for op in of_layer(recipe, 1, 1, 1)]


def _scores(
    candidates: Mapping[str, Recipe],
    which: str,
    layers: list[Layer],
    machine: Machine | Here,
    draws: int,
    goal: str,
    progress: Progress,
) -> list[Score]:
    scores = []
    for i, (key, recipe) in enumerate(candidates.items()):
        progress(f"{which}: {key}", i, len(candidates))
        scores.append(_score(key, recipe, which, layers, machine, draws))
    order: Callable[[Score], tuple] = {
        "error": lambda s: (not s.sound, s.error),
        "bias": lambda s: (not s.sound, s.drift if s.drift > DRIFT else 0.0, s.error),
        "speed": lambda s: (not s.sound, s.seconds),
        "memory": lambda s: (not s.sound, s.bits, s.error),
    }[goal]
    return sorted(scores, key=order)


def _score(key: str, recipe: Recipe, which: str, layers: list[Layer], machine: Machine | Here, draws: int) -> Score:
    products_of: dict[str, list[Measured]] = {}
    faulty: dict[str, str] = {}
    spent = 0.0
    tokens = min((layer.tokens for layer in layers), default=0)  # experts have top_k rows per token
    for layer in layers:
        mine = [row for row in judge(layer, recipe, draws) if (row.gemm == "fprop") == (which == "fprop")]
        products_of.setdefault(layer.module, []).extend(row.measured for row in mine if row.is_product)
        found = next(filter(None, map(_fault, mine)), "")
        if found:
            faulty.setdefault(layer.module, found)
        t, (n, k) = max(layer.tokens // layer.experts, 128), layer.shape
        ops = [op for op in of_layer(recipe, t, n, k) if (op.gemm == "fprop") == (which == "fprop")]
        spent += layer.tokens / max(1, tokens) * layer_seconds(ops, machine) / t
    bits = recipe.weight_bits if which == "fprop" else recipe.saved_activation_bits
    counted = [
        m
        for module, made in products_of.items()
        for m in made
        if module not in faulty or len(faulty) == len(products_of)
    ]
    error = statistics.fmean(m.mse for m in counted)
    drift = statistics.fmean(max(m.law.floor.mean, 0.0) for m in counted) if which == "backward" else 0.0
    return Score(key, error, drift, faulty, spent, bits, len(products_of))


def _fault(row: Row) -> str:
    """What is wrong with an operand or a product, and how much; "" where nothing is."""
    kind, size = next(found_in(row), ("", 0.0))
    of = f"of {row.gemm} {row.what}"
    return {
        "": "",
        "non-finite": f"{size:.1%} of the blocks {of} are not finite",
        "drift": f"{size:.1e} of the energy {of} is drift",
        "noise": f"the noise {of} drowns it: its norm is {size:.2g} times the noise",
        "saturation": f"{size:.1%} of the blocks {of} saturate",
        "underflow": f"{size:.1%} of the blocks {of} underflow",
    }[kind]


def _policy(name: str, fprop: Fprop, pretrain: Recipe) -> Policy:
    def alone(spec: Spec | None, outer: str) -> Spec | None:
        return spec.with_(outer=outer) if spec and spec.fmt.has_global_scale else spec

    sampler = Recipe(Fprop(alone(fprop.x, "row"), alone(fprop.w, "pow2")))
    return Policy(name, pretrain, sampler, Recipe(sampler.fprop))


def _reasons(advice: Advice, chosen: Score, back: Score) -> None:
    forward, backward, goal = advice.ranked["forward"], advice.ranked["backward"], advice.goal
    advice.why[""] = f"Proposed for the goal {goal!r}; times are estimated for {advice.machine}."
    for operand in ("x", "w"):
        advice.why[f"pretrain.fprop.{operand}"] = f"{_said(chosen)}; next: {_others(forward, chosen)}"
    drift = f"floor {back.drift:.1e}, which is no drift" if back.drift <= DRIFT else f"floor {back.drift:.1e}"
    for gemm, what in (("dgrad", ("dy", "w")), ("wgrad", ("dy", "x"))):
        for operand in what:
            advice.why[f"pretrain.{gemm}.{operand}"] = f"{_said(back)}, {drift}; next: {_others(backward, back)}"
        hat = {"dgrad": "w", "wgrad": "x"}[gemm] + HAT
        advice.why[f"pretrain.{gemm}.from_fprop"] = f"from {hat}, so that the gradient is that of the computed forward"
    for operand in ("x", "w"):
        advice.why[f"rl_sampler.fprop.{operand}"] = (
            f"{_said(chosen)} in pretraining's forward; the outer scale does not depend on other rows of the batch"
        )
        advice.why[f"rl_trainer.fprop.{operand}"] = "the sampler's, since any difference is off-policy"


def _said(s: Score) -> str:
    return f"{s.name}: error {s.error:.2e}, {s.bits:g} bits, {1e9 * s.seconds:.3g} ns per token"


def _others(scores: list[Score], but: Score) -> str:
    others = [s for s in scores if s != but][:3]
    marks = (f"{s.name} {s.error:.2e}" + (f" floor {s.drift:.1e}" if s.drift > DRIFT else "") for s in others)
    return ", ".join(marks)


def _exceptions(advice: Advice, chosen: Score, back: Score) -> None:
    """Add rules: a layer with a faulty forward stays in BF16; one with a faulty backward alone keeps its forward."""
    for layer in dict.fromkeys((*chosen.faults, *back.faults)):
        whole = layer in chosen.faults
        score, what, recipe = (
            (chosen, "this layer stays in", Recipe())
            if whole
            else (back, "the backward of this layer stays in", Recipe(advice.policy.pretrain.fprop))
        )
        advice.why[f"rules.{len(advice.policy.rules)}"] = f"{what} BF16: under {score.name}, {score.faults[layer]}"
        advice.policy = replace(advice.policy, rules=(*advice.policy.rules, (layer, recipe)))


def _keep_budget(
    advice: Advice,
    model: nn.Module,
    batches: list,
    loss: Loss,
    names: list[str],
    budget: float,
    progress: Progress,
) -> None:
    """Return layers to BF16, the one that costs most loss first, until the loss is within the budget."""

    def mean(policy: Policy | None) -> float:
        torch.manual_seed(0)
        with plain(model) if policy is None else under(model, policy):
            return mean_loss(model, batches, loss)

    base, now = mean(None), mean(advice.policy)
    if now > base * (1 + budget):
        alone = {}
        for i, layer in enumerate(names):
            progress("sensitivity", i, len(names))
            others = tuple(n for n in names if n != layer)
            alone[layer] = mean(advice.policy.with_(keep=(*advice.policy.keep, *others))) - base
        for layer in sorted(alone, key=lambda name: alone[name], reverse=True):
            advice.policy = advice.policy.with_(keep=(*advice.policy.keep, layer))
            now = mean(advice.policy)
            if now <= base * (1 + budget):
                break
    left = [n for n in names if n in advice.policy.keep]
    change = f"loss {base:.4f} plain, {now:.4f} quantized ({now / base - 1:+.2%}; allowed {budget:.2%})"
    advice.why["keep"] = f"{change}; {len(left)} of {len(names)} layers, which cost most loss, stay in BF16 for it"
    advice.loss = (base, now)
