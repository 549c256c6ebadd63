"""The base of every layer that computes by a policy: the policy, the layer's name, and the recipe of each stage."""

from __future__ import annotations

from torch import nn

from ..policy import policies
from ..policy.policy import Policy
from ..policy.recipe import Recipe


class ByPolicy(nn.Module):
    """A layer that computes by a policy; beside the class of a plain layer, or the only base.

    Attributes:
        policy: the Policy. policy_name: the module's name, by which the policy may choose.
        recipes: the Recipe of each stage, as the policy has them at the layer's step.
        inference_stage: the stage whose recipe runs in eval mode without gradients.
    """

    policy: Policy
    policy_name: str
    recipes: dict[str, Recipe]
    inference_stage: str

    def set_policy(self, policy: Policy | str, name: str = "", step: int = 0) -> None:
        """Use another policy from now on."""
        self.policy, self.policy_name = policies.get(policy), name
        self.set_step(step)

    def set_step(self, step: int) -> None:
        """Tell the layer how far training is, for policies that change with it."""
        self.recipes = self.policy.recipes(self.policy_name, step)
        # A model whose forward has gone back to BF16 is evaluated so, too.
        self.inference_stage = "pretrain" if self.policy.has_bf16_forward(step) else "rl_sampler"


def forget_policy(module: nn.Module) -> None:
    """Remove what set_policy and forward left on a module that becomes plain again."""
    for attribute in ("policy", "policy_name", "recipes", "inference_stage", "_last_stage"):
        module.__dict__.pop(attribute, None)
