"""The cost model: it predicts what this machine takes, and adds up on machines that are described."""

import importlib
import json
import time

import pytest
import torch

import fp4ext
from fp4ext import policies
from fp4ext.audit import machines
from fp4ext.audit.calibrate import calibrate
from fp4ext.audit.cost_model import Shape, cost, layer_seconds
from fp4ext.audit.operations import bits, of_layer

cost_module = importlib.import_module("fp4ext.audit.cost_model")
LLAMA = Shape("8b", layers=32, d=4096, heads=32, kv_heads=8, ffn=14336, context=8192, vocab=128256)


def training_step(policy, t, n, k):
    """A function that runs a converted layer forward and backward, on BF16 activations as autocast hands them out."""
    layer = fp4ext.Linear(k, n, bias=False, policy=policy, dtype=torch.bfloat16)
    x = torch.randn(t, k).bfloat16().requires_grad_()
    dy = torch.randn(t, n).bfloat16()

    def step():
        with torch.enable_grad():
            torch.autograd.grad(layer(x), (x, layer.weight), dy)

    return step


def test_it_predicts_measured_time():
    """Three policies, at sizes other than the calibrated ones, within 25 %; all in the same rounds.

    One thread's CPU time, so that others on the machine matter little."""
    torch.manual_seed(0)
    t, n, k = 384, 512, 384
    names = ("mxfp8", "nvidia", "end_to_end")
    work = {name: of_layer(policies.get(name).pretrain, t, n, k) for name in names}
    work_of_all = [op for ops in work.values() for op in ops]
    for attempt in range(3):  # caches are shared all the same: a slow round misleads, it does not flatter
        steps = {name: training_step(name, t, n, k) for name in names}
        here, measured = calibrate(work_of_all, repeats=9 + 8 * attempt, also=steps, clock=time.thread_time)
        ratio = {name: layer_seconds(work[name], here) / measured[name] for name in names}
        if all(0.75 <= r <= 1.25 for r in ratio.values()):
            return
    raise AssertionError(ratio)


def test_stored_bits():
    assert (bits("nvfp4"), bits("mxfp8"), bits("bf16")) == (4.5, 8.25, 16.0)
    assert 16 / bits("nvfp4") == pytest.approx(3.6, abs=0.05)


def test_work_of_a_layer():
    ops = of_layer(policies.get("end_to_end").pretrain, 64, 32, 16)
    assert [op.kind for op in ops].count("gemm") == 3 and sum(
        op.work for op in ops if op.kind == "gemm"
    ) == 3 * 64 * 32 * 16
    assert [(op.kind, op.gemm) for op in ops if op.kind == "requantize"] == [
        ("requantize", "dgrad"),
        ("requantize", "wgrad"),
    ]
    assert [op.kind for op in of_layer(policies.get("bf16").pretrain, 64, 32, 16)] == ["gemm"] * 3
    decode = of_layer(policies.get("end_to_end").rl_sampler, 1, 32, 16, backward=False, weights_ready=True)
    assert [op.kind for op in decode] == ["quantize", "gemm"]


def test_a_described_machine():
    """10T tokens of an 8B model on 512 chips: the arithmetic by hand, and the order of policies."""
    machine = machines.get("gb300")
    found = {p: cost(LLAMA, p, machine, gpus=512, batch_tokens=16 << 20) for p in ("bf16", "mxfp8", "end_to_end")}
    assert found["bf16"].seconds > max(found["mxfp8"].seconds, found["end_to_end"].seconds)
    b = found["bf16"]
    gemms = sum(t.seconds for t in b.terms if t.name in ("fprop", "dgrad", "wgrad"))
    tokens = (16 << 20) / 512
    assert gemms == pytest.approx(6 * LLAMA.linear_parameters * tokens / (2.5e15 * 0.7), rel=1e-6)
    assert b.overhead == 0 < found["end_to_end"].overhead < 0.6
    assert b.run_seconds(10e12) == pytest.approx(10e12 / (16 << 20) * b.seconds)
    assert LLAMA.parameters == pytest.approx(8.03e9, rel=0.01)
    assert (
        sum(b.memory.values()) < machine.memory
        and found["end_to_end"].memory["saved for backward"] < b.memory["saved for backward"]
    )


def test_each_resource_can_bind():
    machine = machines.get("gb300")
    assert cost(LLAMA, "bf16", machine, gpus=8, batch_tokens=1 << 20).binds.binds == "tensor cores"
    assert cost(LLAMA, "bf16", machine, gpus=4096, batch_tokens=4096 * 128).binds.name == "exchange"
    decode = cost(LLAMA, "end_to_end", machine, batch_tokens=1, stage="rl_sampler")
    assert decode.binds.binds == "memory"
    wide = cost(LLAMA, "bf16", machine, batch_tokens=1, stage="rl_sampler")
    gemm = {c.policy: next(t.bytes for t in c.terms if t.name == "fprop") for c in (decode, wide)}
    assert gemm["bf16"] / gemm["end_to_end"] == pytest.approx(3.55, abs=0.05)


def test_formats_that_a_machine_lacks_are_widened():
    h200 = machines.get("h200")
    assert h200.rate("nvfp4", "nvfp4") == h200.rate("bf16") == h200.rate("mxfp8", "bf16")
    assert machines.get("gb300").rate("nvfp4", "mxfp8") == 5e15


def test_shapes_from_files(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
            | {
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "max_position_embeddings": 8192,
                "vocab_size": 128256,
            }
        )
    )
    assert Shape.read(tmp_path) == Shape.read(tmp_path / "config.json")
    assert Shape.read(tmp_path).parameters == LLAMA.parameters
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(ValueError, match="layers or num_hidden_layers or n_layer is None; accepted: a whole number"):
        Shape.read(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        Shape.read(tmp_path / "none")


MIXTURE = Shape(
    "30b", layers=48, d=2048, heads=32, kv_heads=4, head_dim=128, ffn=0, context=8192, vocab=151936,
    experts=128, top_k=8, expert_ffn=768,
)  # fmt: skip


def test_a_mixture(tmp_path):
    """30 B parameters, of which a token meets 3 B: its products cost as much as those of a dense model of 3 B."""
    machine = machines.get("gb300")
    assert MIXTURE.parameters == pytest.approx(30.5e9, rel=0.01)
    found = cost(MIXTURE, "bf16", machine, gpus=64, batch_tokens=4 << 20)
    met = sum(m.n * m.k * m.count * m.chosen for m in MIXTURE.matrices)
    products = sum(t.operations for t in found.terms if t.name in ("fprop", "dgrad", "wgrad"))
    assert met < 3.2e9 and products == pytest.approx(6 * met * (4 << 20) / 64, rel=1e-3)
    assert found.memory["weights and moments, fp32"] == 12 * MIXTURE.parameters / 64
    few, many = (cost(MIXTURE, "end_to_end", machine, batch_tokens=t, stage="rl_sampler") for t in (1, 512))
    read = {c.tokens: next(t.bytes for t in c.terms if t.name == "fprop") for c in (few, many)}
    assert read[1] == pytest.approx(met * 4.5 / 8, rel=0.02)  # a token alone reads the experts it meets
    assert MIXTURE.linear_parameters * 4.5 / 8 < read[512] < 1.3 * MIXTURE.linear_parameters * 4.5 / 8
    run = {
        "preset": {"name": "moe", "shape": {"layers": 2, "d": 64, "heads": 2, "ffn": 32, "context": 64, "vocab": 256}}
    }
    run["preset"]["shape"] |= {"experts": 4, "top_k": 2, "expert_ffn": 48}
    others = {
        "run": ({"run": run}, (32, 4, 2, 48)),
        "mixtral": ({"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}, (0, 8, 2, 96)),
        "qwen": (
            {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 9, "moe_intermediate_size": 32}
            | {"shared_expert_intermediate_size": 64},
            (64, 8, 2, 32),
        ),
    }
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": 64, "vocab_size": 256}
    for config, wanted in others.values():
        (tmp_path / "config.json").write_text(json.dumps(config if "run" in config else sizes | config))
        shape = Shape.read(tmp_path)
        assert (shape.ffn, shape.experts, shape.top_k, shape.expert_ffn) == wanted


def test_what_cannot_be_priced_is_refused():
    with pytest.raises(ValueError, match="unknown machine 'tpu'; accepted: gb300"):
        machines.get("tpu")
    with pytest.raises(ValueError, match="efficiency is 2"):
        cost(LLAMA, "bf16", machines.get("b200"), efficiency=2)
    with pytest.raises(ValueError, match="one token per chip"):
        cost(LLAMA, "bf16", machines.get("b200"), gpus=8, batch_tokens=4)


# Models that are counted


def priced(tmp_path, model, policy="end_to_end", **how):
    model.config.save_pretrained(tmp_path)
    shape = Shape.read(tmp_path)
    return shape, cost(shape, policy, machines.get("gb300"), **how)


@pytest.mark.parametrize(
    "name",
    ["LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "NemotronHForCausalLM", "Qwen3MoeForCausalLM",
     "JambaForCausalLM", "Mamba2ForCausalLM", "Gemma4ForCausalLM"],
)  # fmt: skip
def test_a_model_of_transformers_is_counted(name, tmp_path):
    """Tied heads, dense layers of a mixture, MLA and hybrids: its parameters, and the layers that convert takes."""
    from ..export.architectures import build

    model = build(name)
    shape, found = priced(tmp_path, model)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert found.memory["weights and moments, fp32"] == 12 * shape.parameters
    report = fp4ext.convert(model, "end_to_end")
    stored = sum(
        w.numel() for n in report.converted for w in model.get_submodule(n).parameters(recurse=False) if w.dim() > 1
    )
    decoding = priced(tmp_path, model, stage="rl_sampler")[1].memory["weights"]
    assert decoding == pytest.approx(stored * 4.5 / 8 + (shape.parameters - stored) * 2, rel=1e-9)


def test_layers_that_attend_and_what_they_keep(tmp_path):
    from ..export.architectures import build

    shape, found = priced(tmp_path, build("NemotronHForCausalLM"), stage="rl_sampler", batch_tokens=1)
    assert found.memory["keys and values"] == 1 * 2 * 2 * 2 * 16 * shape.context  # one layer of three, two heads of 16
    shape, found = priced(tmp_path, build("DeepseekV3ForCausalLM"), stage="rl_sampler", batch_tokens=1)
    assert found.memory["keys and values"] == 2 * 2 * (32 + 8) * shape.context  # the latent, not its heads
    shape, found = priced(tmp_path, build("Mamba2ForCausalLM"), stage="rl_sampler", batch_tokens=1)
    assert found.memory["keys and values"] == 0


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5])
def test_keep_last_means_what_it_does_in_convert(share, tmp_path):
    from ..export.architectures import build

    model = build("LlamaForCausalLM")
    policy = policies.get("mxfp8").with_(keep_last=share)
    shape, found = priced(tmp_path, model, policy, stage="rl_sampler")
    fp4ext.convert(model, policy)
    kept = [n for n, m in model.named_modules() if isinstance(m, fp4ext.Linear)]
    stored = sum(model.get_submodule(n).weight.numel() for n in kept)
    wanted = stored * 8.25 / 8 + (shape.parameters - stored) * 2
    assert found.memory["weights"] == pytest.approx(wanted, rel=1e-9)
    by_sizes = Shape("s", layers=10, d=64, heads=4, ffn=96, context=64, vocab=80)
    assert len(cost_module._chosen(by_sizes, policy)) == 4 * (10 - max(1, int(share * 10 + 0.5)))
