"""Policy: stage × module name × step → Recipe. Each component's precision is a decision, written down here.

The four stages ask for different things: pretraining's forward for low error, its backward for no bias (noise averages
out over tokens and steps, drift compounds), the RL sampler for speed and memory, the RL trainer for agreement with the
sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ..errors import Refused
from .recipe import Fprop, Recipe
from .stages import STAGES, check_stage

# What stays in BF16 by default, by name: heads, routers, and what is as small and as delicate.
KEEP = (
    # heads, by the names that they have in transformers' models
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
    # routers, whole, and gates of one column or of a whole expert
    *("*router*", "gate", "*.gate.wg", "*shared_expert_gate"),
    # attention sinks, the projections that make the taps of a convolution, the step sizes of a state space
    *("*sink_proj", "*.sconv.*", "dt_proj"),
)


@dataclass(frozen=True)
class Policy:
    """Which Recipe a module uses, by stage, name and step.

    Attributes:
        name: what the policy is called in tables and checkpoints.
        pretrain: the recipe of the pretraining stage.
        rl_sampler, rl_trainer: those of the RL stages; default: the sampler has pretrain's fprop made row-invariant
            (an outer scale per row of x, a power of two for w), the trainer the sampler's fprop and a BF16 backward.
        keep: patterns (as in a shell) of module names, or of their last parts, that stay in BF16; default: KEEP. A
            model's head and the parts of its routers, where its class shows them, are kept wherever "lm_head" and
            "router" are. `keep=(*KEEP, …)` adds to the default, as `keep_also` does in a policy file.
        keep_last: share of the blocks, counted from the last, that stay in BF16 (0.15 in NVIDIA's recipe). A block is
            what a module's name says up to its first number ("model.layers.3"), or the module itself where there is
            none; blocks are counted in the model's order, those of all stacks (encoder, decoder) in one row. The share
            is rounded, and is at least one block where it is above 0; a block is never cut.
        rules: (pattern, recipe) pairs that replace `pretrain` for matching modules; the first match counts. In the RL
            stages such a module has its recipe's fprop, with an outer scale a row, and a BF16 backward.
        bf16_forward_from: the step from which fprop runs in BF16, which recovers most of a run's late gap; None: never.
        mean_split: split the mean over tokens off x while pretraining (see Recipe).
        stats_every: steps between live statistics of the quantizers (fp4ext.audit.Monitor); 0: none.
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

    def __post_init__(self):
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
        """Whether the module of that name stays in BF16 whatever the stage."""
        return any(matches(name, pattern) for pattern in self.keep)

    def row_variant(self) -> dict[str, str]:
        """Where the sampler's result for a row depends on the rest of the batch: what it concerns → why; {}: nowhere.

        Keys are "rl_sampler", "rl_trainer", and the patterns of rules.
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

    def with_(self, **changes) -> Policy:
        """A copy with some fields changed, e.g. policies.get("end_to_end").with_(keep_last=0.15)."""
        return replace(self, **changes)


def _row_invariant(fprop: Fprop) -> Fprop:
    """The same with outer scales that no other row decides. (A 16×16 tile of x remains one of 16 rows.)"""
    scaled = [spec if spec and spec.fmt.has_global_scale else None for spec in (fprop.x, fprop.w)]
    x = scaled[0].with_(outer="row") if scaled[0] and scaled[0].block != "16x16" else fprop.x
    return Fprop(x, scaled[1].with_(outer="pow2") if scaled[1] else fprop.w)


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted module name, or its last part, fits a shell pattern."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)
