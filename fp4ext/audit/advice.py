"""advise: rank formats and rules, stage by stage, on a model's own tensors, and write the choice down as a Policy.

Each stage asks for something else, whatever the goal (docs/tour.md):

    pretraining, forward    low error: it is most of the loss gap
    pretraining, backward   no drift first, since noise dilutes over tokens and steps; only then the goal
    RL sampler              as the forward, with an outer scale that a row's batch mates cannot move
    RL trainer              the sampler's own operands, and a backward in BF16 on them: any difference is off-policy

Candidates are measured (layer.py) and priced (cost.py). One that is faulty in more than a quarter of the layers comes
after all that are sound; a layer in which the choice itself shows a fault stays in BF16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ..errors import Refused
from ..nn.noise import SQRT3
from ..policy import policy_file
from ..policy.policy import Policy
from ..policy.recipe import Dgrad, Fprop, Recipe, Wgrad
from ..policy.spec import Spec
from .calibrate import Here
from .capture import Layer, Loss, capture, layers_of, loss_of, mean_loss, plain, under
from .cost_model import layer_seconds
from .layer import HAT, Row, judge
from .machines import Machine
from .operations import Op, of_layer
from .report import DRIFT, SATURATION, UNDERFLOW

GOALS = ("error", "bias", "speed", "memory")
FEW = 0.25  # share of the modules that may be faulty under a candidate that is sound
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
    """A candidate of a stage, over the layers that were measured.

    Attributes:
        error: mean relative MSE of the products (y; dx and dw), of one draw, over the modules that are not faulty: the
            others would be exceptions. Over all, where all are faulty.
        drift: mean floor of the same: what no average removes. Zero in a forward, which is judged by its error.
        faults: module in which its operands or products drift, saturate or underflow → the first that was found.
        seconds: of the stage's GEMMs and quantizers for one token of all layers.
        bits: stored bits an element: of weights (forward), of activations saved for backward.
        modules: how many were measured.
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
        """Whether its faults are few enough to be exceptions of their layers rather than its own doing."""
        return len(self.faults) <= self.modules * FEW


@dataclass
class Advice:
    """A policy, and why.

    Attributes:
        policy: the proposal.
        why: place in the policy file → reason, with numbers.
        ranked: "forward" and "backward" → Scores, the best on the goal first.
        goal, machine: what was asked for, and what it was priced on.
        loss: of the plain model and of the proposal on the batches.
    """

    policy: Policy
    why: dict[str, str]
    ranked: dict[str, list[Score]] = field(default_factory=dict)
    goal: str = "error"
    machine: str = ""
    loss: tuple[float, float] = (0.0, 0.0)

    def text(self, form: str = "toml") -> str:
        """The policy file."""
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
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Advice:
    """Propose a policy for a model.

    Args:
        goal: "error", "bias", "speed" or "memory": what decides among the 4-bit candidates that are sound.
        machine: what the time is priced on.
        budget: relative increase of the loss on the batches that is allowed; layers leave 4 bits, the costliest in loss
            first, until it is kept.
        most: layers that are measured, spread over the model; experts are two.
        name: of the policy.

    Raises:
        Refused: an unknown goal, a budget that is not above zero, no batches, a model without a layer to convert.
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
    """The operations that a machine must be calibrated for, so that every candidate can be priced."""
    recipes = [*FORWARD.values(), *(make(f.fprop) for f in FORWARD.values() for make in BACKWARD.values())]
    return [op for recipe in recipes for op in of_layer(recipe, 1, 1, 1)]


def _scores(candidates, which, layers: list[Layer], machine, draws, goal, progress) -> list[Score]:
    scores = []
    for i, (key, recipe) in enumerate(candidates.items()):
        progress(f"{which}: {key}", i, len(candidates))
        scores.append(_score(key, recipe, which, layers, machine, draws))
    order = {
        "error": lambda s: (not s.sound, s.error),
        "bias": lambda s: (not s.sound, s.drift if s.drift > DRIFT else 0.0, s.error),
        "speed": lambda s: (not s.sound, s.seconds),
        "memory": lambda s: (not s.sound, s.bits, s.error),
    }[goal]
    return sorted(scores, key=order)


def _score(key: str, recipe: Recipe, which: str, layers: list[Layer], machine, draws: int) -> Score:
    products_of, faulty, spent = {}, {}, 0.0
    tokens = min((layer.tokens for layer in layers), default=0)  # experts have rows for each of a token's choices
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
    m, place = row.measured, f"of {row.gemm} {row.what}"
    if m.non_finite > 0:
        return f"{m.non_finite:.1%} of the blocks {place} are not finite"
    if row.gemm != "fprop" and m.law.drifts and m.law.floor.low > DRIFT:
        return f"{m.law.floor.mean:.1e} of the energy {place} is drift"
    if row.gemm != "fprop" and row.is_product and m.snr_ratio < SQRT3:
        return f"the noise {place} drowns it, at {m.snr_ratio:.2g} times the noise"
    for share, limit, what in ((m.saturation, SATURATION, "saturate"), (m.underflow, UNDERFLOW, "underflow")):
        if share > limit:
            return f"{share:.1%} of the blocks {place} {what}"
    return ""


def _policy(name: str, fprop: Fprop, pretrain: Recipe) -> Policy:
    def alone(spec: Spec | None, outer: str) -> Spec | None:
        return spec.with_(outer=outer) if spec and spec.fmt.has_global_scale else spec

    sampler = Recipe(Fprop(alone(fprop.x, "row"), alone(fprop.w, "pow2")))
    return Policy(name, pretrain, sampler, Recipe(sampler.fprop))


def _reasons(advice: Advice, chosen: Score, back: Score) -> None:
    forward, backward, goal = advice.ranked["forward"], advice.ranked["backward"], advice.goal
    advice.why[""] = f"Proposed for the goal {goal!r}; time priced on {advice.machine}."
    for operand in ("x", "w"):
        advice.why[f"pretrain.fprop.{operand}"] = f"{_said(chosen)}; next: {_others(forward, chosen)}"
    drift = (
        f"floor {back.drift:.1e}, unbiased by the averaging law" if back.drift <= DRIFT else f"floor {back.drift:.1e}"
    )
    for gemm, what in (("dgrad", ("dy", "w")), ("wgrad", ("dy", "x"))):
        for operand in what:
            advice.why[f"pretrain.{gemm}.{operand}"] = f"{_said(back)}, {drift}; next: {_others(backward, back)}"
        hat = {"dgrad": "w", "wgrad": "x"}[gemm] + HAT
        advice.why[f"pretrain.{gemm}.from_fprop"] = f"of {hat}, so that it is the gradient of what the forward computed"
    for operand in ("x", "w"):
        advice.why[f"rl_sampler.fprop.{operand}"] = (
            f"{_said(chosen)} in pretraining's forward; an outer scale that a row's batch mates cannot move"
        )
        advice.why[f"rl_trainer.fprop.{operand}"] = "exactly the sampler's: any difference is off-policy"


def _said(s: Score) -> str:
    return f"{s.name}: error {s.error:.2e}, {s.bits:g} bit, {1e9 * s.seconds:.3g} ns a token"


def _others(scores: list[Score], but: Score) -> str:
    others = [s for s in scores if s != but][:3]
    marks = (f"{s.name} {s.error:.2e}" + (f" floor {s.drift:.1e}" if s.drift > DRIFT else "") for s in others)
    return ", ".join(marks)


def _exceptions(advice: Advice, chosen: Score, back: Score) -> None:
    """Layers in which the forward shows a fault stay in BF16; those in which the backward does keep their forward."""
    for layer in dict.fromkeys((*chosen.faults, *back.faults)):
        whole = layer in chosen.faults
        score, what, recipe = (
            (chosen, "this layer stays", Recipe())
            if whole
            else (back, "the backward of this layer stays", Recipe(advice.policy.pretrain.fprop))
        )
        advice.why[f"rules.{len(advice.policy.rules)}"] = f"{what} BF16: under {score.name} {score.faults[layer]}"
        advice.policy = replace(advice.policy, rules=(*advice.policy.rules, (layer, recipe)))


def _keep_budget(advice: Advice, model, batches, loss: Loss, names: list[str], budget: float, progress) -> None:
    """Greedy: the layer that costs most loss leaves 4 bits first, until the loss is within the budget."""

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
        for layer in sorted(alone, key=alone.get, reverse=True):
            advice.policy = advice.policy.with_(keep=(*advice.policy.keep, layer))
            now = mean(advice.policy)
            if now <= base * (1 + budget):
                break
    left = [n for n in names if n in advice.policy.keep]
    change = f"loss on these batches {base:.4f} plain, {now:.4f} so ({now / base - 1:+.2%}; allowed {budget:.2%})"
    advice.why["keep"] = (
        f"{change}; {len(left)} of {len(names)} layers left in BF16 for it, the costliest in loss first"
    )
    advice.loss = (base, now)
