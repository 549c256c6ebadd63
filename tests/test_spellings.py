"""A spec has three spellings, and every function that takes a spec takes them all: a Spec, a Format, a text."""

import pytest
import torch
from safetensors.torch import load_file

import fp4ext
from fp4ext import Dgrad, Fprop, Policy, QuantizedLinear, Spec, Wgrad, formats, reference
from fp4ext.audit import explain
from fp4ext.export import save
from fp4ext.policy import as_spec, policy_file
from fp4ext.testing import generate

X = generate("student_t3", 32, 64)
OFFSETS = torch.tensor([16, 32], dtype=torch.int32)
SPELLINGS = {
    "format": [Spec("nvfp4"), formats.NVFP4, "nvfp4", "nvfp4/amax"],
    "format, MX": [Spec("mxfp8"), formats.MXFP8, "mxfp8", "mxfp8/ceil/nearest"],
    "key": [Spec("nvfp4", "sweep"), "nvfp4/sweep", Spec("nvfp4", "sweep").key],
}


def stored(q):
    return [t.float().tolist() for t in q.tensors().values()]


def saved(spec, tmp_path):
    """The tensors of a checkpoint whose policy is the spec."""
    save({"model.layers.0.mlp.up_proj.weight": X.expand(32, 32, 64).reshape(1024, 64)}, tmp_path, policy=spec)
    return {name: t.float().tolist() for name, t in load_file(tmp_path / "model.safetensors").items()}


FUNCTIONS = {
    "as_spec": lambda spec, tmp: as_spec(spec),
    "quantize": lambda spec, tmp: stored(fp4ext.quantize(X, spec)),
    "quantize a QTensor": lambda spec, tmp: stored(fp4ext.quantize(fp4ext.quantize(X), spec, axis=-2)),
    "grouped_quantize": lambda spec, tmp: stored(fp4ext.grouped_quantize(X, spec, OFFSETS)),
    "grouped_quantize a QTensor": lambda spec, tmp: stored(fp4ext.grouped_quantize(fp4ext.quantize(X), spec, OFFSETS)),
    "reference.quantize": lambda spec, tmp: [t.float().tolist() for t in reference.quantize(X, spec)],
    "Fprop": lambda spec, tmp: Fprop(spec, spec),
    "Dgrad": lambda spec, tmp: Dgrad(spec, spec),
    "Wgrad": lambda spec, tmp: Wgrad(spec, spec),
    "QuantizedLinear": lambda spec, tmp: [
        getattr(QuantizedLinear(fp4ext.quantize(X), x=spec, w=spec), name) for name in "xw"
    ],
    "a policy's table": lambda spec, tmp: policy_file.from_dict({"name": "a", "pretrain": {"fprop": {"x": spec}}}),
    "explain.block": lambda spec, tmp: explain.block([1.0, 2.5, -3.0], spec),
    "export.save": saved,
}


@pytest.mark.parametrize("which", SPELLINGS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_spellings_of_a_spec_mean_the_same(function, which, tmp_path):
    results = [FUNCTIONS[function](spec, tmp_path / str(i)) for i, spec in enumerate(SPELLINGS[which])]
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("name", ["fp5", "nvfp4/best", "nvfp4/sweep/stochastic"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_unknown_name_is_refused_in_the_same_words(function, name, tmp_path):
    with pytest.raises(ValueError) as wanted:
        as_spec(name)
    with pytest.raises(ValueError) as error:
        FUNCTIONS[function](name, tmp_path)
    assert str(wanted.value) in str(error.value)


def test_a_recipe_from_texts_is_that_of_specs():
    policy = Policy("mine", fp4ext.Recipe(Fprop("nvfp4/sweep", formats.MXFP8)))
    assert policy.pretrain == fp4ext.Recipe(Fprop(Spec("nvfp4", "sweep"), Spec("mxfp8")))
    assert fp4ext.Recipe.parse(policy.pretrain.key) == policy.pretrain


def test_parts_beside_a_whole_spec_are_refused():
    for spec in (Spec("nvfp4"), "nvfp4/amax"):
        with pytest.raises(ValueError, match=r"outer='row' beside the whole spec nvfp4/amax/.*; accepted: spec.with_"):
            fp4ext.quantize(X, spec, outer="row")
