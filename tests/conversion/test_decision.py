"""What is quantized is decided once, by the names and classes that a model has; whatever is left says why."""

import importlib
import os

import pytest
import torch
from torch import nn

import fp4ext
from fp4ext import Policy, Recipe, convert, policies, revert
from fp4ext.conversion.decision import decide
from fp4ext.conversion.names import block_of, in_last_blocks, named_modules
from fp4ext.conversion.uncalled import read_without_call

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def lin(*names, size=64):
    return nn.ModuleDict({name: nn.Linear(size, size) for name in names})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.lm_head = nn.Linear(64, 64)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


LAYERS = [f"layers.{i}.{part}" for i in range(4) for part in ("up", "down")]


# Names


@pytest.mark.parametrize(
    "head",
    ["lm_head", "output", "score", "classifier", "qa_outputs", "embed_out", "pooler.dense", "head", "itm_head",
     "lm_loss", "cls.predictions.transform.dense", "classifier.out_proj", "classification_head.dense",
     "bert.pooler.dense",
     "lm_heads.3", "vocab_projector", "codec_head", "class_labels_classifier", "bbox_predictor", "output_projection"],
)  # fmt: skip
def test_heads_are_kept_by_the_names_that_they_have_in_transformers(head):
    assert policies.get("nvidia").keeps(head)


@pytest.mark.parametrize("router", ["mlp.router", "router.proj", "ffn.router.layer", "a.router.classifier", "mlp.gate",
                                    "moe.modality_router", "mlp.gate.wg", "mlp.shared_expert_gate"])  # fmt: skip
def test_routers_are_kept_whole(router):
    assert policies.get("nvidia").keeps(f"model.layers.0.{router}")


@pytest.mark.parametrize("layer", ["layer.0.output.dense", "layer.0.attention.output.dense", "mlp.gate_proj", "c_proj",
                                   "self_attn.out_proj", "decoder.layers.0.fc1", "mlp.gate_up_proj"])  # fmt: skip
def test_layers_whose_names_are_like_those_of_heads_are_not_kept(layer):
    assert not policies.get("nvidia").keeps(f"model.{layer}")


# keep_last


def test_blocks():
    names = ["embed", "enc.layers.0.a", "enc.layers.0.b", "enc.layers.1.a", "dec.layers.0.experts.3.w1", "out"]
    assert [block_of(n) for n in names] == [
        "embed", "enc.layers.0", "enc.layers.0", "enc.layers.1", "dec.layers.0", "out"]  # fmt: skip
    assert in_last_blocks(names, 0) == [] and in_last_blocks(names, 1) == names
    assert in_last_blocks(names, 0.01) == ["out"]
    assert in_last_blocks(names, 0.5) == names[3:]  # 2.5 of 5 blocks: a half is rounded upwards
    assert in_last_blocks(names, 0.8) == names[1:]
    assert in_last_blocks([], 0.5) == []


@pytest.mark.parametrize("layers", [1, 3, 12])
@pytest.mark.parametrize("share", [0.01, 0.15, 0.34, 0.5, 0.99])
def test_no_block_is_cut(layers, share):
    decision = decide(Model(layers), policies.get("nvidia").with_(keep_last=share))
    kept = {name.split(".")[1] for name in decision.left if "in the last" in decision.left[name]}
    assert not kept & {name.split(".")[1] for name in decision.chosen}
    assert len(kept) == max(1, int(share * layers + 0.5))


# What a class shows


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.called, self.asked = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.deep = lin("read", "called")
        nn.init.zeros_(self.called.weight)

    def forward(self, x):
        x = self.asked(x.to(self.asked.weight.dtype)) if self.asked.weight is not None else x
        isinstance(self.called.weight, torch.Tensor)
        return self.called(x @ self.read.weight.T) + self.deep.called(x @ self.deep.read.weight)


class ReadsToo(Reads):
    pass


def test_what_is_read_without_a_call_is_left():
    """Also by a base class's method; questions about a weight are no reads, and building is none."""
    assert read_without_call(ReadsToo) == {"read", "deep.read"}
    m = nn.ModuleDict({"m": ReadsToo()})
    report = convert(m, "nvidia")
    assert report.converted == ["m.called", "m.asked", "m.deep.called"]
    assert report.left["m.read"] == "ReadsToo reads its weight without calling it"
    fp4ext.pack(m)["m"](torch.randn(4, 64))  # a TypeError before


def test_a_class_without_source_is_no_obstacle():
    scope = {"nn": nn}
    exec("class Typed(nn.Module):\n  def forward(self, x): return self.a.weight", scope)
    assert read_without_call(scope["Typed"]) == frozenset()


@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_a_hook_computes_are_left(norm):
    """pack raised AttributeError."""
    m = nn.Sequential(norm(nn.Linear(64, 64)), nn.Linear(64, 64))
    assert convert(m, "nvidia").converted == ["1"]
    with torch.no_grad():
        m(torch.randn(4, 64))  # torch copies no tensor that has a history
        fp4ext.pack(m)(torch.randn(4, 64))


def test_lora_adapters_are_left_and_what_they_adapt_is_not():
    """In the shape that peft gives a layer: q_proj.base_layer, q_proj.lora_A.default."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(64, 64)
            self.lora_A, self.lora_B = lin("default"), lin("default")

        def forward(self, x):
            return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    m = nn.ModuleDict({"q_proj": Adapted(), "lm_head": Adapted()})
    report = convert(m, "nvidia")
    assert report.converted == ["q_proj"] and type(m["q_proj"].base_layer) is fp4ext.Linear
    for name in ("q_proj.lora_A.default", "q_proj.lora_B.default"):
        assert "LoRA adapter" in report.left[name]
    assert "lm_head" in report.left


def test_heads_that_a_class_of_transformers_shows():
    """Whatever they are called; where a policy does not keep "lm_head", they are layers like others."""
    t = importlib.import_module("transformers")
    sizes = dict(vocab_size=80, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    bert = t.BertForSequenceClassification(t.BertConfig(**sizes))
    report = convert(bert, "nvidia")
    assert {"classifier", "bert.pooler.dense"} <= report.left.keys()
    assert len(report.converted) == 6 and "bert.encoder.layer.0.output.dense" in report.converted
    whisper = t.WhisperForConditionalGeneration(
        t.WhisperConfig(vocab_size=80, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, tie_word_embeddings=False,
                        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    )  # fmt: skip
    assert convert(whisper, "nvidia").left["proj_out"].startswith("it is a head of the model")
    assert "proj_out" in convert(whisper, policies.get("nvidia").with_(keep=())).converted


# Wrappers


def wrapped(kind):
    m = Model()
    if kind == "compile":
        return m, torch.compile(m, backend="eager")
    if kind == "a layer compiled":
        m.layers[1] = torch.compile(m.layers[1], backend="eager")
        return m, m
    if kind == "DataParallel":
        return m, nn.DataParallel(m)
    return m, torch.optim.swa_utils.AveragedModel(torch.compile(m, backend="eager"))


@pytest.mark.parametrize("kind", ["compile", "a layer compiled", "DataParallel", "both"])
def test_wrappers_are_not_in_names(kind):
    """Rules match the author's names, and so do the report's."""
    _, model = wrapped(kind)
    policy = policies.get("nvidia").with_(keep=(*policies.get("nvidia").keep, "layers.1.*"))
    report = convert(model, policy)
    assert report.converted == [n for n in LAYERS if not n.startswith("layers.1.")]
    assert set(report.left) == {"layers.1.up", "layers.1.down", "lm_head"}
    modules = dict(named_modules(model))
    assert [n for n, m in modules.items() if type(m) is fp4ext.Linear] == report.converted
    assert all(modules[n].policy_name == n for n in report.converted)
    assert revert(model) == report.converted


def test_names_of_a_plain_model_are_torchs():
    m = Model()
    m.again, m.gone = m.layers[0], None
    assert list(named_modules(m)) == list(m.named_modules())
    m = nn.ModuleDict({"module": nn.Linear(64, 64)})  # a name that a wrapper has too
    assert convert(m, "nvidia").converted == ["module"]


# Reports


def test_what_a_rule_leaves_in_bf16_is_left():
    policy = policies.get("nvidia").with_(rules=(("layers.1.*", Recipe()),))
    m = Model()
    report = convert(m, policy)
    assert report.converted == [n for n in LAYERS if not n.startswith("layers.1.")]
    assert "quantizes nothing in modules of this name" in report.left["layers.1.up"]
    assert type(m.layers[1].up) is nn.Linear
    sampler_alone = Policy("s", rl_sampler=policies.get("nvidia").rl_sampler)
    assert convert(Model(), sampler_alone).converted == LAYERS


def test_a_model_in_which_nothing_is_converted_warns_by_class():
    t = importlib.import_module("transformers")
    gpt2 = t.GPT2LMHeadModel(t.GPT2Config(vocab_size=80, n_embd=64, n_layer=2, n_head=2))
    with pytest.warns(
        UserWarning, match=r"nvidia converts no layer of this model; 8 of them.*Conv1D has no 4-bit form"
    ):
        assert convert(gpt2, "nvidia").converted == []
    with pytest.warns(UserWarning, match="it has no module with matrices"):
        convert(nn.ReLU())


def test_a_policy_that_quantizes_nothing_does_not_warn(recwarn):
    assert convert(Model(), "bf16").converted == [] and not recwarn.list


@pytest.mark.parametrize("before", [None, "mxfp8"])
def test_a_layer_that_fails_leaves_the_model_as_it_was(before, monkeypatch):
    m = Model()
    if before:
        convert(m, before)
    kinds = {n: (type(x), dict(vars(x))) for n, x in m.named_modules()}
    own = fp4ext.Linear.set_policy

    def fails(self, policy, name=""):
        if name == "layers.2.up":
            raise ZeroDivisionError
        own(self, policy, name)

    monkeypatch.setattr(fp4ext.Linear, "set_policy", fails)
    with pytest.raises(ZeroDivisionError):
        convert(m, "nvidia")
    assert {n: (type(x), vars(x)) for n, x in m.named_modules()} == kinds


def test_a_packed_copy_follows_a_model_that_is_wrapped_otherwise():
    m = Model()
    convert(m, "nvidia")
    packed = fp4ext.pack(torch.compile(m, backend="eager"))
    with torch.no_grad():
        m.layers[0].up.weight.mul_(2)
    fp4ext.refit(packed, m)
    x = torch.randn(4, 64)
    with torch.no_grad(), fp4ext.stage("rl_sampler"):
        assert torch.equal(packed._orig_mod(x), m(x))
