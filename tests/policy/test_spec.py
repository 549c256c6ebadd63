"""Spec: what is accepted, what is refused and how it says so, and the string that crosses to C++."""

import dataclasses
import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4ext import Spec, formats
from fp4ext.policy.spec import RHTS, ROUNDINGS

WORDS = {
    "format": [*formats.FORMATS, "fp5"],
    "scale": [*formats.NVFP4.scale_rules, *formats.MXFP8.scale_rules, "max"],
    "rounding": [*ROUNDINGS, "down"],
    "block": [*formats.NVFP4.blocks, *formats.MXFP8.blocks, "16x1"],
    "outer": [*formats.NVFP4.outers, *formats.MXFP8.outers, "column"],
    "rht": [*RHTS, "8"],
}


def is_accepted(format, scale, rounding, block, outer, rht):
    """Whether docs/numerics.md allows the combination, stated a second time."""
    nvfp4 = format == "nvfp4"
    if format not in ("nvfp4", "mxfp8", "mxfp8_e5m2", "mxfp4") or rht == "8" or rounding == "down":
        return False
    if nvfp4 != (scale not in ("ceil", "floor")) or scale == "max":
        return False
    if nvfp4 != (block in ("1x16", "16x16")) or block == "16x1":
        return False
    if nvfp4 != (outer in ("tensor", "pow2", "row", "row_pow2", "expert", "expert_pow2")) or outer == "column":
        return False
    if block == "16x16" and (rounding.startswith("eden") or rht != "none" or outer in ("row", "row_pow2")):
        return False
    if rounding == "stochastic":
        return scale in ("amax", "minvar", "ceil")
    rules = {"eden": ("amax", "sweep"), "eden_block": ("amax",)}
    return rounding == "nearest" or (nvfp4 and rht != "none" and scale in rules[rounding])


@pytest.mark.parametrize("format", WORDS["format"])
def test_every_combination_is_accepted_or_refused_by_the_contract(format):
    """A refusal says what would be accepted."""
    for words in itertools.product([format], *list(WORDS.values())[1:]):
        try:
            spec = Spec(*words)
        except ValueError as error:
            assert not is_accepted(*words), words
            assert "accepted: " in str(error) or "formats: " in str(error), error
        else:
            assert is_accepted(*words), words
            assert spec.key == str(spec) == "/".join(words) and Spec.parse(spec.key) == spec


def test_defaults():
    assert Spec().key == "nvfp4/amax/nearest/1x16/tensor/none"
    for name in ("mxfp8", "mxfp8_e5m2", "mxfp4"):
        assert Spec(name).key == f"{name}/ceil/nearest/1x32/none/none"
        assert Spec(formats.get(name)) == Spec(name) and Spec(name).fmt is formats.get(name)


@pytest.mark.parametrize("rht, key", [(None, "none"), (16, "16"), ("128", "128"), ("128x2", "128x2")])
def test_rht_may_be_a_number(rht, key):
    assert Spec(rht=rht).rht == key and Spec(rht=rht).needs_rng is (key != "none")


@given(
    st.sampled_from([words for words in itertools.product(*WORDS.values()) if is_accepted(*words)]), st.integers(1, 6)
)
def test_a_key_may_end_early(words, n):
    """What is left out is the default."""
    try:
        wanted = Spec(*words[:n])
    except ValueError:
        with pytest.raises(ValueError):
            Spec.parse("/".join(words[:n]))
    else:
        assert Spec.parse("/".join(words[:n])) == wanted


REFUSED = {
    "unknown format 'fp5'; formats: nvfp4, mxfp8, mxfp8_e5m2, mxfp4": ("fp5",),
    "unknown format ['nvfp4']; formats: nvfp4, ": (["nvfp4"],),
    "unknown scale rule for nvfp4: 'ceil'; accepted: amax, four_over_six, four_over_six_mae, four_over_six_absmax, "
    "sweep, minvar": ("nvfp4", "ceil"),
    "unknown scale rule for nvfp4: ''; accepted: amax, ": ("nvfp4", ""),
    "unknown scale rule for mxfp4: 'sweep'; accepted: ceil, floor": ("mxfp4", "sweep"),
    "unknown rounding: 'up'; accepted: nearest, stochastic, eden, eden_block": ("nvfp4", "amax", "up"),
    "unknown block for mxfp8: '1x16'; accepted: 1x32": ("mxfp8", "ceil", "nearest", "1x16"),
    "unknown outer scale for mxfp8: 'tensor'; accepted: none": ("mxfp8", "ceil", "nearest", "1x32", "tensor"),
    "unknown outer scale for nvfp4: 'none'; accepted: tensor, pow2, row, row_pow2, expert, expert_pow2": (
        "nvfp4", None, "nearest", None, "none"),
    "unknown rht: '8'; accepted: none, 16, 32, 64, 128, 16x2, 32x2, 64x2, 128x2": (
        "nvfp4", "amax", "nearest", "1x16", "tensor", 8),
    "biased): 'sweep'; accepted: amax, minvar": ("nvfp4", "sweep", "stochastic"),
    "biased): 'floor'; accepted: ceil": ("mxfp8", "floor", "stochastic"),
    "unknown format with eden rounding: 'mxfp8'; accepted: nvfp4": ("mxfp8", "ceil", "eden", None, None, 128),
    "unknown scale rule with eden rounding: 'minvar'; accepted: amax, sweep": (
        "nvfp4", "minvar", "eden", None, None, 16),
    "unknown scale rule with eden_block rounding: 'sweep'; accepted: amax": (
        "nvfp4", "sweep", "eden_block", None, None, 128),
    "eden_block rounding needs an rht, got 'none'; accepted: 16, ": ("nvfp4", "amax", "eden_block"),
    "eden rounding needs an rht, got 'none'; accepted: 16, 32, 64, 128, 16x2": ("nvfp4", "amax", "eden"),
    "16x16 blocks take neither eden rounding nor an rht, got rounding='nearest', rht='16'; accepted: ": (
        "nvfp4", "amax", "nearest", "16x16", "tensor", 16),
    "so outer='row' is undefined; accepted: tensor, pow2, expert, expert_pow2": (
        "nvfp4", "amax", "nearest", "16x16", "row"),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED, ids=lambda m: m)
def test_refusals(message):
    with pytest.raises(ValueError) as error:
        Spec(*REFUSED[message])
    assert message in str(error.value)


def test_a_key_of_seven_parts_is_refused():
    with pytest.raises(ValueError, match="has 7 parts; accepted: format/scale/rounding/block/outer/rht"):
        Spec.parse(Spec().key + "/none")


def test_the_group_of_an_outer_scale_and_its_rounding_are_apart():
    known = {outer: (Spec(outer=outer).group, Spec(outer=outer).pow2) for outer in formats.NVFP4.outers}
    assert known == {
        "tensor": ("tensor", False),
        "pow2": ("tensor", True),
        "row": ("row", False),
        "row_pow2": ("row", True),
        "expert": ("expert", False),
        "expert_pow2": ("expert", True),
    }
    assert (Spec("mxfp8").group, Spec("mxfp8").pow2) == ("none", False)
    alone = [Spec(outer=outer).of_one_expert().outer for outer in ("expert", "expert_pow2", "row_pow2")]
    assert alone == ["tensor", "pow2", "row_pow2"]


def test_it_is_data():
    spec = Spec("nvfp4", "sweep", "eden", rht="128x2")
    assert spec == Spec(**dataclasses.asdict(spec)) == pickle.loads(pickle.dumps(spec))
    assert len({spec, Spec.parse(spec.key), Spec()}) == 2
    assert spec.with_(outer="pow2").key == "nvfp4/sweep/eden/1x16/pow2/128x2"
    with pytest.raises(ValueError):  # checked anew
        spec.with_(rht="none")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.scale = "amax"


def test_needs_rng():
    assert not Spec("nvfp4", "sweep").needs_rng
    assert Spec(rounding="stochastic").needs_rng and Spec("mxfp8", rht=64).needs_rng
