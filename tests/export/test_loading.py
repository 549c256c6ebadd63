"""load: weights by name, a model that stays packed, and `inspect`."""

import json

import pytest
import torch
from torch import nn

import fp4ext
from fp4ext import QTensor, QuantizedLinear, Spec, quantize
from fp4ext.cli import main
from fp4ext.export import LAYOUTS, Refused, convert_checkpoint, inspect, load, save
from fp4ext.testing import assert_bytes_equal, generate
from fp4ext.train.models.transformer import Transformer
from fp4ext.train.runs.presets import Shape

from .judges import mixed
from .models import MODELS, folder_of, logits, opened, plain, plain_twin
from .weights import weight

SHAPE = Shape(layers=2, d=64, heads=2, ffn=96, context=32)


def transformer(seed=0):
    model = Transformer(SHAPE, seed)
    nn.init.normal_(model.lm_head.weight, std=0.1)
    return model.eval()


@pytest.fixture
def folder(tmp_path):
    save(transformer(), tmp_path / "out", "fp4ext")
    return tmp_path / "out"


def test_a_checkpoint_is_a_mapping_read_as_it_is_asked(folder, monkeypatch):
    checkpoint = load(folder)
    monkeypatch.setattr(checkpoint.folder, "read", lambda name: pytest.fail(f"{name} was read"))
    assert len(checkpoint) == len(list(checkpoint)) == len(transformer().state_dict())
    name = "blocks.0.mlp.down.weight"
    assert name in checkpoint and checkpoint.shape(name) == (64, 96) and checkpoint.format(name).name == "nvfp4"
    assert checkpoint.nbytes(name) == 64 * 96 * 4.5 / 8 + 4 and "8 of them quantized" in repr(checkpoint)
    with pytest.raises(KeyError):
        checkpoint["nothing"]


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "fp4ext"])
def test_a_model_stays_packed_and_generates(layout, tmp_path):
    """≤ 0.6 byte a weight; logits are those of the converted model in the sampler's stage, bit for bit."""
    model = transformer()
    fp4ext.convert(model, "end_to_end")
    save(model, tmp_path / "out", layout)
    with torch.device("meta"):
        packed = Transformer(SHAPE)
    packed.rope = transformer().rope  # its tables are no part of a checkpoint
    assert load(tmp_path / "out", packed) is packed
    layers = {name: m for name, m in packed.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(layers) == 8 and not any(t.is_meta for t in (*packed.parameters(), *packed.buffers()))
    held = sum(t.nbytes for m in layers.values() for t in m.buffers())
    weights = sum(m.in_features * m.out_features for m in layers.values())
    assert held / weights <= 0.6
    tokens = torch.randint(0, 256, (1, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(8):
        with torch.no_grad(), fp4ext.stage("rl_sampler"):
            assert_bytes_equal(packed(tokens), model(tokens), layout)
            tokens = torch.cat((tokens, packed(tokens)[:, -1:].argmax(-1)), 1)
    save(packed, tmp_path / "again", layout)
    for name, w in load(tmp_path / "out").items():
        again = load(tmp_path / "again")[name]
        if isinstance(w, QTensor):
            assert_bytes_equal(again.codes, w.codes)
            assert_bytes_equal(again.scales, w.scales)
        else:
            assert_bytes_equal(again, w)


def test_a_real_class_stays_packed(tmp_path):
    """A transformers Llama, every linear packed, weight-only: its logits are those of the decoded weights but for the
    order of sums."""
    save(plain("llama", tmp_path / "plain"), tmp_path / "out")
    model = opened(tmp_path / "plain")
    load(tmp_path / "out", model, policy="bf16")
    assert sum(isinstance(m, QuantizedLinear) for m in model.modules()) == 14
    twin = opened(plain_twin(tmp_path / "out", tmp_path / "plain", tmp_path / "twin"))
    a, b = logits(model).float(), logits(twin).float()
    assert (a - b).abs().max() <= 2**-5 * b.abs().max()


def test_transposed_experts_stay_packed(tmp_path):
    save(plain("gpt_oss", tmp_path / "plain"), tmp_path / "out", "gpt-oss")
    model = load(tmp_path / "out", MODELS["gpt_oss"]().bfloat16())
    q = load(tmp_path / "out")["model.layers.1.mlp.experts.gate_up_proj"]
    assert_bytes_equal(model.model.layers[1].mlp.experts.held("gate_up_proj").codes, q.codes)


def test_experts_of_which_a_stack_is_plain_are_decoded(tmp_path):
    def up(name, shape):
        return "down_proj" not in name

    save(plain("gpt_oss", tmp_path / "plain"), tmp_path / "out", "gpt-oss", filter=up)
    model = load(tmp_path / "out", MODELS["gpt_oss"]().bfloat16())
    q = load(tmp_path / "out")["model.layers.1.mlp.experts.gate_up_proj"]
    got = model.model.layers[1].mlp.experts.gate_up_proj
    assert isinstance(got, nn.Parameter)
    assert_bytes_equal(got.data, q.dequantize(torch.bfloat16).mT.contiguous())


def test_tied_weights_stay_tied(tmp_path):
    torch.manual_seed(0)

    def build():
        model = nn.ModuleDict({"embed": nn.Embedding(64, 64), "w": nn.Linear(64, 64), "h": nn.Linear(64, 64)})
        model["h"].weight = model["embed"].weight
        return model

    model = build()
    state = {n: t for n, t in model.state_dict().items() if n != "h.weight"}
    save(state, tmp_path / "out")
    for device in ("cpu", "meta"):
        with torch.device(device):
            new = build()
        load(tmp_path / "out", new)
        assert new["h"].weight is new["embed"].weight and isinstance(new["w"], QuantizedLinear)
        assert_bytes_equal(new["embed"].weight.data, model["embed"].weight.data)


def test_a_plain_checkpoint_fills_a_model_too(tmp_path):
    source = transformer(3)
    folder_of(tmp_path, dict(source.state_dict()))
    model = load(tmp_path, transformer(4))
    for name, t in model.state_dict().items():
        assert_bytes_equal(t, source.state_dict()[name], name)


@pytest.mark.parametrize("change, message", [
    (lambda m: setattr(m, "extra", nn.Linear(4, 4)), r"it lacks 'extra.weight' and 1 more; accepted"),
    (lambda m: delattr(m, "lm_head"), "the model has no 'lm_head.weight'; accepted"),
    (lambda m: setattr(m, "lm_head", nn.Linear(64, 9, bias=False)), r"is \(256, 64\); accepted: \(9, 64"),
])  # fmt: skip
def test_a_model_that_does_not_fit_is_left_as_it_is(change, message, folder):
    model = transformer(5)
    change(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(Refused, match=message):
        load(folder, model)
    assert model.state_dict().keys() == before.keys()
    for name, t in model.state_dict().items():
        assert_bytes_equal(t, before[name], name)
    with pytest.raises(Refused, match="model is dict"):
        load(folder, {})


def test_a_faulty_weight_leaves_the_model_as_it_is(folder):
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors, metadata = {n: file.get_tensor(n) for n in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["blocks.1.mlp.gate_up.weight.scales"].view(torch.uint8)[0, 0] = 0x7F
    save_file(tensors, folder / "model.safetensors", metadata)
    model = transformer(5)
    with pytest.raises(Refused, match="blocks.1.mlp.gate_up.weight.*is NaN"):
        load(folder, model)
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())
    assert_bytes_equal(model.embed.weight.data, transformer(5).embed.weight.data)


# inspect


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inspect_is_readable(layout, tmp_path, capsys):
    source = generate("student_t3", 2, 64, 64, dtype=torch.bfloat16)
    experts = {"m.layers.0.experts.w13_weight": source, "m.layers.0.experts.w2_weight": source[:, :, :32].contiguous()}
    experts |= {f"{name.replace('.0.', '.1.')}": w for name, w in experts.items()} | {"m.norm.weight": torch.ones(64)}
    save(experts, tmp_path / "out", layout)
    found = inspect(tmp_path / "out")
    assert not found.faults and found.layout == layout and sum(row.weights for row in found.rows) in (4, 12)
    assert found.bits == pytest.approx(4.25 if layout == "gpt-oss" else 4.5, abs=0.06)
    assert main(["inspect", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    for words in (f"layout {layout}", "outer scale", "block scales", "m.layers.*.", "m.norm.weight", "no faults"):
        assert words in text, words
    assert max(map(len, text.splitlines())) < 200


def test_inspect_of_plain_weights(tmp_path):
    found = inspect(plain("llama", tmp_path))
    assert found.layout == "plain" and not found.rows and "no faults" in str(found)


def test_inspect_counts(tmp_path):
    x = torch.zeros(32, 64)
    x[:16] = generate("gaussian", 16, 64)
    save({"a.weight": quantize(x, Spec("nvfp4", outer="pow2"))}, tmp_path / "out", "modelopt")
    (row,) = inspect(tmp_path / "out").rows
    assert row.zero == 0.5 and row.name == "a.weight" and row.shape == (32, 64) and row.weights == 1
    magnitudes = torch.stack(
        (load(tmp_path / "out")["a.weight"].codes & 7, load(tmp_path / "out")["a.weight"].codes >> 4 & 7)
    )
    assert row.top == pytest.approx((magnitudes == 7).float().mean().item(), abs=1e-6)


def test_a_module_excluded_under_its_old_dtype_is_a_fault(tmp_path, capsys):
    """The tensors say packed, the config says plain: some readers believe the one, some the other."""

    save(
        {"a.weight": generate("gaussian", 64, 64), "b.weight": generate("gaussian", 64, 64)},
        tmp_path / "out",
        "modelopt",
    )
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] = ["b", "re:.*a"]
    path.write_text(json.dumps(config))
    assert inspect(tmp_path / "out").faults == ["'b.weight' is quantized, the config excludes it ('b')"]
    assert main(["inspect", str(tmp_path / "out")]) == 2
    assert "fault: 'b.weight' is quantized" in capsys.readouterr().out
    path.unlink()
    (tmp_path / "out" / "hf_quant_config.json").unlink()
    assert "no quantization_config" in inspect(tmp_path / "out").faults[0]
    convert_checkpoint(tmp_path / "out", tmp_path / "new", "compressed-tensors")
    assert not inspect(tmp_path / "new").faults


# The command line


def test_export_a_run_from_the_command_line(tmp_path, capsys):
    from fp4ext import train
    from fp4ext.train.runs import presets

    preset = presets.get("tiny").with_(shape=SHAPE, steps=2, batch=2, eval_windows=2, final_windows=2)
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes a dull boy. " * 2000)
    train.pretrain(train.Config(preset, policies=("bf16", "end_to_end"), data=(str(text),)), tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "8 in nvfp4" in capsys.readouterr().out
    assert main(["convert-checkpoint", str(tmp_path / "out"), str(tmp_path / "new"), "--layout", "modelopt"]) == 0
    assert main(["inspect", str(tmp_path / "new")]) == 0
    model = load(tmp_path / "new", Transformer(SHAPE).eval())
    assert model(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()
    args = ["export", str(tmp_path / "run"), str(tmp_path / "mx"), "--arm", "bf16", "--policy", "mxfp8"]
    assert main([*args, "--include", "blocks.1.*", "--exclude", "*.down.*", "--layout", "fp4ext"]) == 0
    formats = {name: load(tmp_path / "mx").format(name) for name in load(tmp_path / "mx")}
    assert sorted(n for n, f in formats.items() if f) == [
        f"blocks.1.{n}.weight" for n in ("attention.out", "attention.qkv", "mlp.gate_up")
    ]


@pytest.mark.parametrize("argv, words", [
    (["export", "{run}", "{out}"], "no checkpoint in it yet"),
    (["export", "none", "{out}"], "none: not there; accepted: a folder with model.safetensors"),
    (["export", "{in}", "{out}", "--arm", "x"], "--arm x: "),
    (["export", "{in}", "{out}", "--layout", "x"], "unknown layout 'x'"),
    (["export", "{in}", "{out}", "--policy", "x"], "unknown policy 'x'"),
    (["export", "{in}", "{in}"], "holds a checkpoint; accepted"),
    (["convert-checkpoint", "{in}", "{out}"], "nothing in it is quantized"),
    (["inspect", "{run}"], "no safetensors file in it"),
    (["export", "{in}", "{out}", "--shard", "0"], "--shard: '0'; accepted: a whole number from 1"),
])  # fmt: skip
def test_refusals_are_one_line(argv, words, tmp_path, capsys):
    folder_of(tmp_path / "in", {"a.weight": generate("gaussian", 64, 64)})
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    paths = {name: str(tmp_path / name) for name in ("in", "out", "run")}
    with pytest.raises(SystemExit) as stop:
        main([arg.format(**paths) for arg in argv])
    text = capsys.readouterr().err
    assert stop.value.code == 2 and text.count("\n") == 1 and words in text and not (tmp_path / "out").exists()


def test_the_help_teaches(capsys):
    for command in ("export", "inspect", "convert-checkpoint"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert len(capsys.readouterr().out) > 350


def test_mixed_policies_load_into_one_model(tmp_path):
    save(transformer(), tmp_path / "out", policy=mixed(pattern="*blocks.1.*"))
    model = load(tmp_path / "out", transformer(1), policy=mixed(pattern="*blocks.1.*"))
    assert model.blocks[0].mlp.down.x.format == "nvfp4" and model.blocks[1].mlp.down.x.format == "mxfp8"
    assert model(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


class Mixture(nn.Module):
    """Rows sorted by expert go through experts, then through a linear layer."""

    def __init__(self):
        super().__init__()
        self.experts = fp4ext.Experts(4, 64, 96, policy="end_to_end", name="experts")
        self.out = fp4ext.Linear(64, 64, policy="end_to_end", name="out")

    def forward(self, x, offsets):
        return self.out(self.experts(x, offsets))


@pytest.mark.parametrize("layout", ["fp4ext", "inkling2"])
def test_experts_stay_packed(layout, tmp_path):
    """From a module, and from a layout that holds experts in rows that alternate (by names of the module again)."""
    torch.manual_seed(0)
    model = Mixture()
    save(model, tmp_path / "out", layout)
    folder = tmp_path / "out"
    if layout == "inkling2":
        w = load(folder)
        halves = w["experts.w13_weight"]
        order = torch.arange(192).view(96, 2).T.reshape(-1)
        q = fp4ext.export.Stored.of(halves).rows(order).q
        names = {"experts.gate_up_proj": q, "experts.down_proj": w["experts.w2_weight"]}
        save(
            names | {n: w[n] for n in ("out.weight", "out.bias")}, tmp_path / "named", "fp4ext", filter=lambda *a: False
        )
        folder = tmp_path / "named"
    packed = load(folder, Mixture())
    assert isinstance(packed.experts, fp4ext.QuantizedExperts)
    held = sum(t.nbytes for t in packed.experts.buffers())
    assert held / (4 * 3 * 64 * 96) <= 0.6
    x, offsets = generate("gaussian", 9, 64), torch.tensor([2, 5, 5, 9], dtype=torch.int32)
    with torch.no_grad(), fp4ext.stage("rl_sampler"):
        assert_bytes_equal(packed.experts(x, offsets), model.experts(x, offsets))
    save(packed, tmp_path / "again", "fp4ext", filter=lambda *a: False)
    assert_bytes_equal(
        load(tmp_path / "again")["experts.gate_up_proj"].codes, load(folder)["experts.gate_up_proj"].codes
    )


def test_an_unknown_policy_leaves_the_model_as_it_was(tmp_path):
    save({"0.weight": weight(64, 64)}, tmp_path / "out")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    before = model[0], model[0].weight, model[0].weight.clone()
    with pytest.raises(ValueError, match="nope"):
        load(tmp_path / "out", model, policy="nope")
    assert model[0] is before[0] and model[0].weight is before[1] and torch.equal(model[0].weight, before[2])
