"""Planted faults: the audit names exactly those, and none elsewhere."""

from dataclasses import replace

import pytest
import torch

import fp4ext
from fp4ext import Dgrad, Fprop, Recipe, Spec, policies
from fp4ext.audit import capture
from fp4ext.nn import layer_ops
from fp4ext.nn.noise import SQRT3

from .conftest import PRESET

DRAWS = 12


def named(report, kinds=("drift", "saturation", "underflow", "non-finite", "noise")):
    return {(f.module, f.gemm, f.what, f.kind) for f in report.faults if f.kind in kinds}


def planted(biased, saturating):
    """end_to_end with two faults: a dgrad that rounds to nearest, a scale that saturates."""
    policy = policies.get("end_to_end")
    sound = policy.pretrain
    honest, nearest = Spec("nvfp4", rounding="stochastic"), Spec("nvfp4")
    drifts = Recipe(sound.fprop, Dgrad(nearest, honest, from_fprop=True), sound.wgrad)
    cuts = Recipe(Fprop(Spec("mxfp4", "floor"), sound.fprop.w), sound.dgrad, sound.wgrad)
    return policy.with_(name="planted", rules=((biased, drifts), (saturating, cuts)))


def drowned_weight(model, block):
    """One row of q of that block 2e6 times too large, and the rows of k that it meets zero: the function stays, but
    beside that row all other weights are too small for a scale that the tensor shares."""
    d, half = PRESET.shape.d, PRESET.shape.head_dim // 2
    with torch.no_grad():
        w = model.blocks[block].attention.qkv.weight
        w[3] *= 2e6
        w[[d + 3, d + 3 + half]] = 0.0


def test_a_sound_model_has_no_faults(model, batches):
    report = fp4ext.audit.measure(model, batches, ["end_to_end"], draws=DRAWS)
    assert not report.faults
    assert len(report.layers) == 8 and len(report.rows["end_to_end"]) == 8 * 9
    assert min(report.ratios["end_to_end"].values()) > SQRT3
    assert abs(report.losses["end_to_end"] - report.losses["bf16"]) < 0.05


def test_planted_faults_are_named_and_none_elsewhere(model, batches):
    drowned_weight(model, 1)
    policy = planted("blocks.0.mlp.down", "blocks.0.mlp.gate_up")
    report = fp4ext.audit.measure(model, batches, [policy], draws=DRAWS)
    found = named(report)
    drift = {("blocks.0.mlp.down", "dgrad", what, "drift") for what in ("dy", "dx")}
    saturation = {("blocks.0.mlp.gate_up", "fprop", "x", "saturation")}
    underflow = {f for f in found if f[0] == "blocks.1.attention.qkv" and f[3] == "underflow"}
    assert ("blocks.1.attention.qkv", "fprop", "w", "underflow") in underflow
    assert found == drift | saturation | underflow


def test_a_fault_in_the_code_is_named_too(model, batches, monkeypatch):
    """Recipes are sound; in one layer's dgrad a scale comes back 3 % too small. Only the products can tell."""
    honest = layer_ops._both_ways
    wide = 2 * PRESET.shape.ffn  # gate_up's outputs

    def faulty(t, *rest):
        row, col = honest(t, *rest)
        hit = t.shape[1] == wide and torch.equal(t, layer_dy[:])
        return (replace(row, global_scale=0.97 * row.global_scale), col) if hit else (row, col)

    name = "blocks.1.mlp.gate_up"
    layer_dy = capture.capture(model, batches, [name])[name].dy
    monkeypatch.setattr(layer_ops, "_both_ways", faulty)
    report = fp4ext.audit.measure(model, batches, ["end_to_end"], draws=DRAWS)
    assert named(report) == {(name, "dgrad", "dx", "drift")}
    (fault,) = report.faults
    assert fault.size == pytest.approx(9e-4, rel=0.25)  # 0.03²
    row = next(r for r in report.rows["end_to_end"] if (r.module, r.what) == (name, "dx"))
    assert row.measured.signed.high < -0.02 and row.measured.misalignment == pytest.approx(0.03, rel=0.1)


def test_the_model_is_what_it_was(model, batches):
    """Classes, gradients and random state; converted or not."""
    fp4ext.convert(model, "nvidia")
    before = {n: (type(m), getattr(m, "policy", None)) for n, m in model.named_modules()}
    torch.manual_seed(3)
    fp4ext.audit.measure(model, batches[:1], ["mxfp8"], draws=3, tokens=64)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))
    assert before == {n: (type(m), getattr(m, "policy", None)) for n, m in model.named_modules()}
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_audited_is_refused(model, batches):
    with pytest.raises(ValueError, match="batches is empty"):
        fp4ext.audit.measure(model, [])
    with pytest.raises(ValueError, match="draws is 2; accepted: 3 or more"):
        fp4ext.audit.measure(model, batches, draws=2)
    with pytest.raises(ValueError, match="unknown policy"):
        fp4ext.audit.measure(model, batches, ["int4"])
    with pytest.raises(TypeError, match="accepted: a scalar loss"):
        fp4ext.audit.measure(model, [batches[0][:1]])


def test_a_policy_that_takes_no_layer_is_no_clean_bill():
    """A subclass of nn.Linear alone: the report was empty and without faults."""

    class Special(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = torch.nn.Sequential(Special(64, 64))
    with pytest.raises(ValueError, match="policy nvidia converts no layer of this model; .*subclass of nn.Linear"):
        fp4ext.audit.measure(model, [(torch.randn(4, 64),)], ["end_to_end", "nvidia"][1:])
    with pytest.raises(ValueError, match="end_to_end converts no layer"):
        fp4ext.audit.measure(model, [(torch.randn(4, 64),)])
