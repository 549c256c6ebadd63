"""Recipe: three GEMMs, six operands, as data."""

import dataclasses

import pytest

from fp4ext import Dgrad, Fprop, Recipe, Spec, Wgrad

NVFP4, MXFP8 = Spec("nvfp4", "sweep"), Spec("mxfp8")
SR = Spec(rounding="stochastic")
ROTATED, TWICE = Spec(rht="128"), Spec(rht="128x2")


@pytest.mark.parametrize("gemm, fields", [(Fprop, "x w"), (Dgrad, "dy w"), (Wgrad, "dy x")])
@pytest.mark.parametrize("pair", [(ROTATED, NVFP4), (ROTATED, None), (ROTATED, TWICE), (ROTATED, Spec(rht="64"))])
def test_a_one_sided_rht_is_refused(gemm, fields, pair):
    """It would not cancel."""
    for operands in (pair, pair[::-1]):
        with pytest.raises(ValueError, match=rf"{gemm.__name__.lower()}: both operands need the same rht.*'128'"):
            Recipe(**{gemm.__name__.lower(): gemm(**dict(zip(fields.split(), operands, strict=True)))})
    Recipe(**{gemm.__name__.lower(): gemm(**dict.fromkeys(fields.split(), ROTATED))})


def test_quantizes_and_needs_rng():
    assert not Recipe().quantizes and not Recipe().needs_rng
    for field, gemm in (("fprop", Fprop(w=SR)), ("dgrad", Dgrad(dy=SR)), ("wgrad", Wgrad(x=SR))):
        recipe = Recipe(**{field: gemm})
        assert recipe.quantizes and recipe.needs_rng
    assert Recipe(Fprop(NVFP4, NVFP4), Dgrad(MXFP8, MXFP8, True)).needs_rng is False


@pytest.mark.parametrize(
    "recipe, weights, activations",
    [
        (Recipe(), 16, 16),
        (Recipe(Fprop(NVFP4, MXFP8)), 8.25, 4.5),  # the backward reads the forward's copies
        (Recipe(Fprop(w=NVFP4)), 4.5, 16),
        (Recipe(Fprop(MXFP8, MXFP8), wgrad=Wgrad(NVFP4, NVFP4)), 8.25, 4.5),  # a copy of its own
        (Recipe(Fprop(MXFP8, MXFP8), wgrad=Wgrad(NVFP4, NVFP4, from_fprop=True)), 8.25, 8.25),
        (Recipe(wgrad=Wgrad(NVFP4, NVFP4, from_fprop=True)), 16, 16),
        (Recipe(Fprop(Spec("mxfp4"), Spec("mxfp4"))), 4.25, 4.25),
    ],
)
def test_stored_bits(recipe, weights, activations):
    assert (recipe.weight_bits, recipe.saved_activation_bits) == (weights, activations)


def test_a_backward_may_not_read_rotated_operands():
    rotated = Fprop(ROTATED, ROTATED)
    Recipe(rotated, Dgrad(SR, NVFP4), Wgrad(SR, NVFP4)).check_backward()
    for name, bad in {
        "dgrad": Recipe(rotated, wgrad=Wgrad(SR, NVFP4)),
        "wgrad": Recipe(rotated, Dgrad(SR, NVFP4), Wgrad(SR, NVFP4, from_fprop=True)),
    }.items():
        with pytest.raises(ValueError, match=f"{name} reads the forward operand, which has rht='128'; accepted: "):
            bad.check_backward()


def test_it_is_data():
    recipe = Recipe(Fprop(NVFP4, NVFP4))
    assert recipe == Recipe(Fprop(NVFP4, Spec("nvfp4", "sweep"))) and hash(recipe) != hash(Recipe())
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.fprop = Fprop()
