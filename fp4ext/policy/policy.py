"""Policy: stage × module name × step → Recipe.

The stages need different things. The forward of pretraining needs low error, and its backward no bias, because noise
averages out over tokens and steps while a bias adds up. The RL sampler needs speed and little memory, and the RL
trainer needs to agree with the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ..errors import Refused
from .recipe import Fprop, Recipe, short_repr
from .stages import STAGES, check_stage

# The names of modules that stay in BF16 by default: heads, routers, and other small modules that need precision.
KEEP = (
    # heads, by their names in transformers' models
    *("lm_head", "output", "head", "*_head", "lm_heads.*", "*.lm_heads.*", "embed_out", "score", "qa_outputs"),
    *(
        "classifier",
        "*_classifier",
        "*classifier.*",
        "*_head.*",
        "*pooler.*",
        "cls.*",
        "*_predictor",
        "seq_relationship",
    ),
    *(
        "output_projection",
        "vocab_projector",
        "vocab_transform",
        "lm_loss",
        "logits_proj",
        "logits_dense",
        "class_embed",
    ),
    # routers, with everything inside them, and gates of one column or of a whole expert
    *("*router*", "gate", "*.gate.wg", "*shared_expert_gate"),
    # attention sinks, the projections that compute the taps of a convolution, the step sizes of a state-space model
    *("*sink_proj", "*.sconv.*", "dt_proj"),
)


@dataclass(frozen=True)
class Policy:
    """Which Recipe a module uses, by stage, name and step.

    Attributes:
        name: the policy's name in tables and checkpoints.
        pretrain: the recipe of the pretraining stage.
        rl_sampler: the recipe of the RL sampler. Default (None): the fprop of `pretrain`, made row-invariant by one
            outer scale per row of x and one power of two for w.
        rl_trainer: the recipe of the RL trainer. Default (None): the sampler's fprop with a BF16 backward.
        keep: shell patterns of modules that stay in BF16; a pattern is matched against the module's name and against
            the last part of the name. Default: KEEP. `keep=(*KEEP, …)` adds to the default, as `keep_also` does in a
            policy file. A policy that keeps "lm_head" also keeps every module that the model's class shows to be its
            head, and a policy that keeps "router" every part of a router.
        keep_last: the share of the blocks, counted from the last, that stays in BF16 (0.15 in NVIDIA's recipe,
            arXiv 2509.25149). A block's name is a module's name up to its first number ("model.layers.3"), or the whole
            name where it has none. Blocks are counted in the model's order, across all stacks (encoder, decoder). The
            number of blocks is rounded, is at least 1 where the share is above 0, and a block is never divided.
        rules: (pattern, recipe) pairs that replace `pretrain` for matching modules; the first match counts. In the RL
            stages such a module has its recipe's fprop, with one outer scale per row, and a BF16 backward.
        bf16_forward_from: the step from which fprop runs in BF16, which closes most of the loss gap to a BF16 run late
            in training; None: never.
        mean_split: subtract the mean over tokens from x while pretraining (see Recipe).
        stats_every: steps between live statistics of the quantizers (fp4ext.audit.Monitor); 0: none.

    Raises:
        ValueError: keep_last is outside of 0 to 1, or stats_every is no whole number from 0.
        TypeError: keep, rules or a recipe of another type.
    """

    name: str
    pretrain: Recipe = Recipe()
    rl_sampler: Recipe | None = None
    rl_trainer: Recipe | None = None
    keep: tuple[str, ...] = KEEP
    keep_last: float = 0.0
    rules: tuple[tuple[str, Recipe], ...] = ()
    bf16_forward_from: int | None = None
    mean_split: bool = False
    stats_every: int = 0

    def __repr__(self) -> str:
        return f"policies.get({self.name!r})" if SHIPPED.get(self.name) == self else short_repr(self)

    def __post_init__(self) -> None:
        if isinstance(self.stats_every, bool) or not isinstance(self.stats_every, int) or self.stats_every < 0:
            raise Refused(f"stats_every is {self.stats_every!r}; accepted: a whole number of steps, 0 for never")
        if not 0 <= self.keep_last <= 1:
            raise Refused(f"keep_last is {self.keep_last}; accepted: a share from 0 to 1")
        if isinstance(self.keep, str) or not all(isinstance(pattern, str) for pattern in self.keep):
            raise TypeError(f'keep is {self.keep!r}; accepted: a list of patterns, e.g. ("lm_head", "*.router")')
        if not all(isinstance(rule, tuple) and list(map(type, rule)) == [str, Recipe] for rule in self.rules):
            raise TypeError(f"rules is {self.rules!r}; accepted: (pattern, Recipe) pairs")
        for what in ("pretrain", "rl_sampler", "rl_trainer"):
            recipe = getattr(self, what)
            if not isinstance(recipe, Recipe) and (recipe is not None or what == "pretrain"):
                raise TypeError(f"{what} is {recipe!r}; accepted: a Recipe")

    def recipe(self, stage: str, name: str, step: int = 0) -> Recipe:
        """The recipe of module `name` in a stage at a step. Raises ValueError for an unknown stage."""
        check_stage(stage)
        if self.keeps(name):
            return Recipe()
        rule = next((recipe for pattern, recipe in self.rules if matches(name, pattern)), None)
        base = rule or self.pretrain
        if stage == "pretrain":
            base = replace(base, mean_split=base.mean_split or self.mean_split)
            return replace(base, fprop=Fprop()) if self.has_bf16_forward(step) else base
        if rule:
            return Recipe(fprop=_row_invariant(rule.fprop))
        sampler = self.rl_sampler or Recipe(fprop=_row_invariant(base.fprop))  # never with a mean over the batch
        return sampler if stage == "rl_sampler" else self.rl_trainer or Recipe(fprop=sampler.fprop)

    def recipes(self, name: str, step: int = 0) -> dict[str, Recipe]:
        """The recipe of a module in every stage."""
        return {stage: self.recipe(stage, name, step) for stage in STAGES}

    def has_bf16_forward(self, step: int) -> bool:
        """Whether fprop runs in BF16 at that step."""
        return self.bf16_forward_from is not None and step >= self.bf16_forward_from

    def keeps(self, name: str) -> bool:
        """Whether the module of that name stays in BF16 in every stage."""
        return any(matches(name, pattern) for pattern in self.keep)

    def row_variant(self) -> dict[str, str]:
        """The recipes under which a row's result depends on the rest of the batch, each with the reason.

        Keys are "rl_sampler", "rl_trainer" and the patterns of rules. The result is empty where every recipe of the RL
        stages is row-invariant.
        """
        found = {stage: recipe for stage in STAGES[1:] for recipe in [self.with_(keep=(), rules=()).recipe(stage, "")]}
        found |= {pattern: Recipe(fprop=_row_invariant(recipe.fprop)) for pattern, recipe in self.rules}
        found = {what: recipe for what, recipe in found.items() if recipe.quantizes}
        reasons = {what: recipe.row_variant() for what, recipe in found.items()}
        return {what: why for what, why in reasons.items() if why}

    def row_variance_warnings(self) -> list[str]:
        """A sentence for each entry of row_variant."""
        return [
            f"policy {self.name}, {what}: {why}, so a row's result depends on its batch, and sampler and trainer agree "
            "on equal batches alone; an outer scale per row of x (outer='row') would make it independent"
            for what, why in self.row_variant().items()
        ]

    @property
    def quantizes(self) -> bool:
        """Whether the policy quantizes anything, in any stage, in modules of any name."""
        everywhere = (self.pretrain, self.rl_sampler, self.rl_trainer, *(recipe for _, recipe in self.rules))
        return any(recipe is not None and recipe.quantizes for recipe in everywhere)

    def log_stats(self, every: int = 50) -> Policy:
        """A copy whose quantizers are watched while training: see fp4ext.audit.Monitor."""
        return replace(self, stats_every=every)

    def with_(self, **changes: Any) -> Policy:
        """A copy with some fields changed, e.g. policies.get("end_to_end").with_(keep_last=0.15)."""
        return replace(self, **changes)


# The policies that ship, by name. policies.py fills it.
SHIPPED: dict[str, Policy] = {}


def _row_invariant(fprop: Fprop) -> Fprop:
    """fprop with outer scales that do not depend on other rows of x. (16 rows still share a 16×16 block of x.)"""
    x, w = fprop.x, fprop.w
    if x and x.fmt.has_global_scale and x.block != "16x16":
        x = x.with_(outer="row")
    return Fprop(x, w.with_(outer="pow2") if w and w.fmt.has_global_scale else w)


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted module name, or its last part, fits a shell pattern."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)
