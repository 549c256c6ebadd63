"""The experts of a mixture are audited, advised on and watched as linear layers are: by module, stack and operand."""

import pytest
import torch

import fp4ext
from fp4ext import Spec, policies
from fp4ext.audit import Monitor, advise, live, machines
from fp4ext.audit.capture import bare, capture, layers_of, under
from fp4ext.audit.layer import operands, products
from fp4ext.audit.operand import measured, observe
from fp4ext.functional.grouped import grouped_quantize
from fp4ext.nn.experts import Experts, grouped_linear
from fp4ext.testing import assert_bytes_equal, generate

from .conftest import MIXTURE
from .test_faults import named, planted

GATE_UP, DOWN = (f"blocks.1.mlp.experts.{stack}" for stack in ("gate_up_proj", "down_proj"))


def layer_of(model, batches, name=GATE_UP, tokens=512):
    with under(model, "end_to_end"):
        assert name in layers_of(model)
    return capture(model, batches, [name], tokens=tokens)[name]


def test_what_is_captured(mixture, batches):
    """Rows sorted by expert, their gradients beside them, and the model as it was."""
    before = {name: dict(vars(m)) for name, m in mixture.named_modules()}
    layer = layer_of(mixture, batches, tokens=10**6)
    assert before == {name: dict(vars(m)) for name, m in mixture.named_modules()}
    rows = 2 * MIXTURE.shape.top_k * 4 * MIXTURE.shape.context  # 2 batches of 4 windows
    assert layer.tokens == rows == int(layer.offsets[-1]) == len(layer.x) == len(layer.dy)
    assert layer.w.shape == (4, 96, 64) and layer.shape == (96, 64) and len(layer.amax["dy"]) == 2
    seen = []
    with bare(mixture):  # the gradients of the stack are those of the rows kept
        experts = mixture.blocks[1].mlp.experts
        loss = sum(mixture(*batch) for batch in batches)
        (seen,) = torch.autograd.grad(loss, [experts.gate_up_proj])
    for e, (x, dy) in enumerate(zip(layer.each(layer.x), layer.each(layer.dy), strict=True)):
        assert (dy.T @ x - seen[e]).norm() < 0.01 * seen[e].norm()  # kept in BF16


def test_operands_are_what_grouped_quantize_makes(mixture, batches):
    layer = layer_of(mixture, batches)
    spec = Spec("nvfp4", "sweep")
    found = {(r.gemm, r.what): r.measured for r in operands(layer, policies.get("end_to_end").pretrain, 4)}
    assert set(found) == {
        ("fprop", "x"),
        ("fprop", "w"),
        ("dgrad", "dy"),
        ("dgrad", "w"),
        ("wgrad", "dy"),
        ("wgrad", "x"),
    }
    for what, t, offsets in (("x", layer.x, layer.offsets), ("w", layer.w, None)):
        image = grouped_quantize(t, spec, offsets, role=what).dequantize(torch.float32)
        wanted = (image - t).double().square().sum() / t.double().square().sum()
        assert found["fprop", what].mse == pytest.approx(wanted.item(), rel=1e-6)


def test_products_run_the_layers_own_code(mixture, batches):
    layer, recipe = layer_of(mixture, batches), policies.get("mxfp8").pretrain
    (y, dx, dw) = products(layer, recipe)
    truth = torch.cat([x @ w.T for x, w in zip(layer.each(layer.x), layer.each(layer.w), strict=True)]).double()
    made = grouped_linear(layer.x, layer.w, layer.offsets, recipe)
    assert y.measured.mse == pytest.approx(((made - truth).square().sum() / truth.square().sum()).item(), rel=0.02)
    assert (y.gemm, dx.gemm, dw.gemm) == ("fprop", "dgrad", "wgrad") and 0 < dw.measured.mse < 0.01


@pytest.mark.parametrize("rows", [37, 48, 200])
def test_a_contraction_with_padding_is_no_drift(rows):
    """Experts have any number of rows. What rotation puts into the padding of a block is a part of x too."""
    x = generate("gaussian", rows, 256, seed=3)
    spec = Spec("nvfp4", "sweep", "eden", rht="128x2")
    _, m = measured([observe(x, spec, -2, "x", {"x": x}, draws=24)])
    assert not m.law.drifts and m.mse == pytest.approx(7.2e-3, rel=0.15)


def test_a_sound_mixture_has_no_faults(mixture, batches):
    report = fp4ext.audit.measure(mixture, batches, ["end_to_end"], draws=12)
    assert not report.faults
    assert {GATE_UP, DOWN} <= report.layers.keys() and len(report.layers) == 2 * (2 + 2 + 2)
    assert {GATE_UP, DOWN} <= report.ratios["end_to_end"].keys()
    assert report.layers[DOWN]["shape"] == (4, 64, 48) and len(report.rows["end_to_end"]) == 12 * 9


def test_planted_faults_are_named_by_stack_and_operand(mixture, batches):
    drown(mixture.blocks[0].mlp.experts, expert=2)
    policy = planted("blocks.1.mlp.experts", "blocks.0.mlp.experts")
    report = fp4ext.audit.measure(mixture, batches, [policy], draws=12)
    found = named(report)
    drift = {(name, "dgrad", what, "drift") for name in (GATE_UP, DOWN) for what in ("dy", "dx")}
    first = [f"blocks.0.mlp.experts.{stack}" for stack in ("gate_up_proj", "down_proj")]
    saturation = {(name, "fprop", "x", "saturation") for name in first}
    underflow = {f for f in found if f[0] == first[0] and f[3] == "underflow"}
    assert (first[0], "fprop", "w", "underflow") in underflow
    assert found == drift | saturation | underflow


@torch.no_grad()
def drown(experts, expert):
    """One row of gate so large that all other weights of that expert are too small for a scale they share. Its unit is
    dead (up and down are zero there), so the function stays what it was without it."""
    hidden = experts.down_proj.shape[2]
    experts.gate_up_proj[expert, 5] *= 2e6
    experts.gate_up_proj[expert, hidden + 5] = 0.0
    experts.down_proj[expert, :, 5] = 0.0


def test_advice_for_a_mixture(mixture, batches, tmp_path):
    advice = advise(mixture, batches, machine=machines.get("gb300"), draws=5, tokens=64, most=3, budget=0.05)
    assert advice.policy.pretrain == policies.get("end_to_end").pretrain
    assert fp4ext.convert(mixture, advice.policy).converted == [
        f"blocks.{i}.{name}"
        for i in range(2)
        for name in ("attention.qkv", "attention.out", "mlp.experts", "mlp.shared.gate_up", "mlp.shared.down")
    ]


def test_an_exception_names_the_module(mixture, batches, monkeypatch):
    """A rule is for a module, not for one of its stacks: policies choose by module."""
    monkeypatch.setattr(
        fp4ext.audit.advice, "_fault", lambda row: "too bad" * ("experts" in row.module and row.gemm == "dgrad")
    )
    advice = advise(mixture, batches, machine=machines.get("gb300"), draws=3, tokens=16, most=12, budget=0.5)
    assert [pattern for pattern, _ in advice.policy.rules] == ["blocks.0.mlp.experts", "blocks.1.mlp.experts"]
    assert advice.policy.recipe("pretrain", "blocks.1.mlp.experts").dgrad.dy is None
    assert advice.why["rules.0"].startswith("the backward of this layer stays in BF16: under ")


def test_transformers_experts_are_audited(tmp_path):
    """Stacked experts of a model of another's, plain or converted: the same rows, and the model as it was."""
    from tests.export.models import MODELS, VOCAB

    torch.manual_seed(0)
    model = MODELS["gpt_oss"]().float()  # biases, alternating rows, [E, K, N]
    tokens = torch.randint(0, VOCAB, (2, 2, 24))
    batches = [{"input_ids": t, "labels": t} for t in tokens]
    kinds = {name: type(m) for name, m in model.named_modules()}
    report = fp4ext.audit.measure(model, batches, ["end_to_end"], draws=3, tokens=64)
    assert kinds == {name: type(m) for name, m in model.named_modules()}
    names = [f"model.layers.{i}.mlp.experts.{stack}" for i in range(2) for stack in ("gate_up_proj", "down_proj")]
    assert set(names) <= report.layers.keys() and report.layers[names[0]]["shape"] == (4, 64, 64)
    fp4ext.convert(model, "nvidia")
    again = fp4ext.audit.measure(model, batches, ["end_to_end"], draws=3, tokens=64)
    a, b = (
        {(r.module, r.gemm, r.what): r.measured.mse for r in x.rows["end_to_end"] if r.module in names}
        for x in (report, again)
    )
    assert a.keys() == b.keys() and len(a) == 4 * 9
    for key in a:
        assert a[key] == pytest.approx(b[key], rel=0.02), key


def test_live_statistics_of_experts(mixture, batches):
    fp4ext.convert(mixture, policies.get("end_to_end"))
    monitor = Monitor(mixture, every=1)
    assert set(layers_of(mixture)) == set(monitor.layers)
    with monitor.watch(0):
        mixture(*batches[0]).backward()
    stats = monitor.line["stats"]
    assert set(stats[DOWN]) == {"x", "w", "dy"} and not monitor.line["warnings"]
    assert 20 < stats[DOWN]["w"]["snr_db"] < 24 and stats[GATE_UP]["dy"]["amax"] > 0
    assert not any("product" in vars(m) for m in mixture.modules())
    with torch.no_grad():
        mixture.blocks[1].mlp.experts.down_proj[3, 0, 0] = float("nan")
    with monitor.watch(7):
        mixture(*batches[0])
    (said,) = [w for w in monitor.line["warnings"] if "not finite" in w and f"{DOWN}, w" in w]
    assert said.startswith("step 8, ")


def test_looking_at_experts_changes_no_bit(mixture, batches):
    fp4ext.convert(mixture, policies.get("end_to_end"))
    grads = []
    for every in (0, 1):
        torch.manual_seed(5)
        mixture.zero_grad()
        with Monitor(mixture, every).watch(0):
            mixture(*batches[0]).backward()
        grads.append(mixture.blocks[0].mlp.experts.gate_up_proj.grad.clone())
    assert_bytes_equal(*grads)
    assert live.oscillating([]) == 0.0


def test_experts_alone():
    """The module itself, without a name of its own: its layers have the stacks' names."""
    torch.manual_seed(0)
    experts = Experts(3, 64, 32, policy="end_to_end")
    batch = generate("gaussian", 40, 64), torch.tensor([8, 8, 40], dtype=torch.int32)
    report = fp4ext.audit.measure(
        experts, [batch], ["end_to_end"], draws=3, loss=lambda model, b: model(*b).square().sum()
    )
    assert list(report.layers) == ["gate_up_proj", "down_proj"] and len(report.rows["end_to_end"]) == 18
