"""Policies: the table of those that ship, and what a policy answers by stage, module name and step."""

import dataclasses
import pickle

import pytest

from fp4ext import Dgrad, Fprop, Policy, Recipe, Spec, Wgrad, policies
from fp4ext.policy.policy import matches
from fp4ext.policy.stages import STAGES

# fprop x, w · dgrad dy, w · wgrad dy, x, as keys; "of fprop": the backward reads the dequantized forward operands.
NV = "nvfp4/{}/nearest/1x16/tensor/none".format
TILE, SR = "nvfp4/amax/nearest/16x16/tensor/none", "nvfp4/amax/stochastic/1x16/tensor/none"
SR16, RNE16 = "nvfp4/amax/stochastic/1x16/tensor/16", "nvfp4/amax/nearest/1x16/tensor/16"
TILE46 = "nvfp4/four_over_six/nearest/16x16/tensor/none"
SR2 = "nvfp4/minvar/stochastic/1x16/tensor/128x2"
EDEN_BLOCK, EDEN2 = "nvfp4/amax/eden_block/1x16/tensor/128", "nvfp4/sweep/eden/1x16/tensor/128x2"
MX = "mxfp8/ceil/nearest/1x32/none/none"
TABLE = {
    "bf16": (None, None, None, None, None, None, ""),
    "mxfp8": (MX, MX, MX, MX, MX, MX, ""),
    "nvidia": (NV("amax"), TILE, SR, TILE, SR16, RNE16, ""),
    "four_over_six": (NV("four_over_six"), TILE46, SR, TILE46, SR16, RNE16, ""),
    "quartet2": (NV("four_over_six"), NV("four_over_six"), EDEN_BLOCK, EDEN_BLOCK, EDEN_BLOCK, EDEN_BLOCK, "of fprop"),
    "end_to_end": (NV("sweep"), NV("sweep"), EDEN2, EDEN2, EDEN2, EDEN2, "of fprop"),
    "end_to_end_sr": (NV("sweep"), NV("sweep"), SR2, EDEN2, SR2, EDEN2, "of fprop"),
    "mxfp8_backward": (NV("sweep"), NV("sweep"), MX, MX, MX, MX, "of fprop"),
}
SAMPLER_SCALE = {"nvidia": "amax", "four_over_six": "four_over_six", "quartet2": "four_over_six"}


def keys(recipe):
    operands = (recipe.fprop.x, recipe.fprop.w, recipe.dgrad.dy, recipe.dgrad.w, recipe.wgrad.dy, recipe.wgrad.x)
    reads = {recipe.dgrad.from_fprop, recipe.wgrad.from_fprop}
    assert len(reads) == 1
    return *(None if spec is None else spec.key for spec in operands), "of fprop" if reads.pop() else ""


def test_the_table_is_complete():
    assert policies.names() == list(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_pretraining_is_the_table_row(name):
    assert keys(policies.get(name).recipe("pretrain", "layers.0.up")) == TABLE[name]


@pytest.mark.parametrize("name", TABLE)
def test_the_rl_stages(name):
    """The sampler's rows have outer scales of their own; the trainer has exactly its forward, and a BF16 backward."""
    sampler, trainer = (policies.get(name).recipe(stage, "up") for stage in ("rl_sampler", "rl_trainer"))
    x = w = TABLE[name][0]
    if name not in ("bf16", "mxfp8"):
        x, w = (f"nvfp4/{SAMPLER_SCALE.get(name, 'sweep')}/nearest/1x16/{outer}/none" for outer in ("row", "pow2"))
    assert keys(sampler) == (x, w, None, None, None, None, "")
    assert trainer == sampler and not sampler.needs_rng


def test_get():
    policy = policies.get("nvidia")
    assert policies.get(policy) is policy
    for bad in ("fp5", None, ["nvidia"]):
        with pytest.raises(ValueError, match=", ".join(TABLE)):
            policies.get(bad)


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match="unknown stage 'train'; accepted: pretrain, rl_sampler, rl_trainer"):
        Policy("p").recipe("train", "up")


def test_recipes_of_every_stage():
    policy = policies.get("end_to_end")
    assert policy.recipes("up", 3) == {stage: policy.recipe(stage, "up", 3) for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_kept_modules_are_bf16_in_every_stage(stage):
    policy = policies.get("end_to_end").with_(keep=("lm_head", "layers.0.*"))
    for name, kept in {"lm_head": 1, "model.lm_head": 1, "layers.0.up": 1, "layers.10.up": 0, "lm_head2": 0}.items():
        assert policy.keeps(name) == bool(kept)
        assert policy.recipe(stage, name).quantizes != bool(kept), name


def test_kept_by_default():
    for name in ("lm_head", "output", "model.layers.3.router", "mlp.gate"):
        assert policies.get("nvidia").keeps(name)
    for name in ("", "gate_proj", "o_proj", "mlp.gate.up"):
        assert not policies.get("nvidia").keeps(name)


@pytest.mark.parametrize(
    "name, pattern, fits",
    [("a.b.c", "c", True), ("a.b.c", "a.*", True), ("a.b.c", "b", False), ("a.b.C", "c", False), ("", "*", True)],
)
def test_matches(name, pattern, fits):
    assert matches(name, pattern) is fits


def test_the_first_rule_that_fits_counts():
    mx, plain = policies.get("mxfp8").pretrain, Recipe()
    policy = policies.get("end_to_end").with_(rules=(("*.down", mx), ("layers.0.*", plain)))
    assert policy.recipe("pretrain", "layers.0.down") == mx
    assert policy.recipe("pretrain", "layers.0.up") == plain
    assert policy.recipe("pretrain", "layers.1.up") == policy.pretrain


def test_a_rule_without_a_sampler_reaches_the_rl_stages():
    mx = policies.get("mxfp8").pretrain
    policy = Policy("p", policies.get("end_to_end").pretrain, rules=(("down", mx),))
    assert policy.recipe("rl_sampler", "down") == policy.recipe("rl_trainer", "down") == Recipe(mx.fprop)


def test_a_trainer_may_have_its_own_backward():
    mx = Spec("mxfp8")
    sampler = policies.get("end_to_end").rl_sampler
    trainer = Recipe(sampler.fprop, Dgrad(mx, mx, True), Wgrad(mx, mx, True))
    assert policies.get("end_to_end").with_(rl_trainer=trainer).recipe("rl_trainer", "up") == trainer


def test_bf16_forward_from():
    policy = policies.get("nvidia").with_(bf16_forward_from=100)
    early, late = policy.recipe("pretrain", "up", 99), policy.recipe("pretrain", "up", 100)
    assert early == policy.pretrain
    assert late == dataclasses.replace(early, fprop=Fprop()) and late.dgrad.dy is not None
    assert policy.recipe("rl_sampler", "up", 100) == policy.rl_sampler
    assert policies.get("nvidia").recipe("pretrain", "up", 10**9) == early


BAD = {
    "keep_last is 1.5; accepted: a share from 0 to 1": (ValueError, {"keep_last": 1.5}),
    "keep_last is nan; accepted: ": (ValueError, {"keep_last": float("nan")}),
    "keep is 'lm_head'; accepted: a list of patterns": (TypeError, {"keep": "lm_head"}),
    "keep is (1,); accepted: ": (TypeError, {"keep": (1,)}),
    "pretrain is 'nvidia'; accepted: a Recipe": (TypeError, {"pretrain": "nvidia"}),
    "pretrain is None; accepted: a Recipe": (TypeError, {"pretrain": None}),
    "rl_sampler is 'nvidia'; accepted: a Recipe": (TypeError, {"rl_sampler": "nvidia"}),
    "rules is (('down', 'mxfp8'),); accepted: ": (TypeError, {"rules": (("down", "mxfp8"),)}),
}


@pytest.mark.parametrize("message", BAD, ids=lambda m: m)
def test_refusals(message):
    error, change = BAD[message]
    with pytest.raises(error) as caught:
        policies.get("end_to_end").with_(**change)
    assert message in str(caught.value)


def test_a_repr_is_short():
    """Defaults of signatures show it."""
    assert repr(policies.get("end_to_end")) == "policies.get('end_to_end')"
    assert repr(Recipe()) == "Recipe()" and repr(Recipe(mean_split=True)) == "Recipe(mean_split=True)"
    spec = Spec("mxfp8")
    assert repr(Dgrad(spec, from_fprop=True)) == f"Dgrad(dy={spec!r}, from_fprop=True)"
    other = policies.get("end_to_end").with_(keep_last=0.15)
    assert repr(other).startswith("Policy(name='end_to_end', pretrain=Recipe(") and "keep_last=0.15" in repr(other)
    names = {"Spec": Spec, "Recipe": Recipe, "Fprop": Fprop, "Dgrad": Dgrad, "Wgrad": Wgrad, "Policy": Policy}
    assert eval(repr(other), names) == other


def test_it_is_data():
    policy = policies.get("end_to_end")
    assert pickle.loads(pickle.dumps(policy)) == policy and hash(policy) != hash(policies.get("nvidia"))
    assert policy.with_(keep_last=0.15).keep_last == 0.15 and policy.keep_last == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.name = "other"
