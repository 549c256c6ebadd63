"""The mixture of experts against its definition, its balance, and what sampler and trainer choose."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch import nn

import fp4ext
from fp4ext.testing import assert_bytes_equal
from fp4ext.train import PRESETS, Config, Refused, Shape, pretrain, resume
from fp4ext.train.models.moe import Balance, MoE, Router
from fp4ext.train.models.transformer import Transformer
from fp4ext.train.runs import checkpoint
from fp4ext.train.sampler import Request, Sampler

from ..conftest import MICRO, InterruptAt
from ..test_invariance import MOE, model, running
from ..test_pretraining import metrics, same_checkpoint
from ..test_sampler import requests, same

MOE_MICRO = MICRO.with_(shape=replace(MICRO.shape, experts=5, top_k=2, expert_ffn=32))


def mixture(experts=5, top_k=2, seed=0):
    torch.manual_seed(seed)
    shape = Shape(layers=1, d=32, heads=2, ffn=48, context=8, experts=experts, top_k=top_k, expert_ffn=16)
    made = MoE(shape, nn.Linear(32, 32))
    nn.init.normal_(made.router.weight)
    return made


def by_definition(m, x):
    """Token by token, in fp64."""
    rows = []
    for row in x.double().flatten(0, -2):
        s = (m.router.weight.double() @ row).softmax(0)
        ranked = sorted(range(len(s)), key=lambda e: (-(s[e] + m.router.selection_bias[e]).item(), e))  # noqa: B023
        chosen = ranked[: m.router.top_k]
        y = m.shared.weight.double() @ row + m.shared.bias.double()
        for e in chosen:
            gate, up = (m.experts.gate_up_proj[e].double() @ row).chunk(2)
            weight = s[e] / s[chosen].sum() if m.router.top_k > 1 else s[e]
            y = y + weight * (m.experts.down_proj[e].double() @ (nn.functional.silu(gate) * up))
        rows.append(y)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("experts, top_k", [(5, 2), (4, 4), (3, 1)])
def test_the_mixture_is_its_definition(experts, top_k):
    """Forward and every gradient, within 1e-5 of the largest: fp32 sums of 32 terms against fp64."""
    m, x = mixture(experts, top_k), torch.randn(3, 7, 32, requires_grad=True)
    m.router.selection_bias.copy_(torch.linspace(-0.3, 0.3, experts))
    leaves = [x, *m.parameters()]
    got, wanted = m(x), by_definition(m, x)
    weights = torch.randn(x.shape)
    for name, a, b in zip(
        ["y", "x", *dict(m.named_parameters())],
        [got, *torch.autograd.grad((got * weights).sum(), leaves)],
        [wanted, *torch.autograd.grad((wanted * weights).sum(), leaves)],
        strict=True,
    ):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name


def test_ties_go_to_the_lower_index():
    router = mixture(experts=20, top_k=3).router
    nn.init.zeros_(router.weight)
    p, chosen = router(torch.randn(50, 32))
    assert (chosen == torch.arange(3)).all() and (p == p[0, 0]).all()
    router.selection_bias[[7, 11]] = 0.5
    assert (router(torch.randn(50, 32))[1] == torch.tensor([7, 11, 0])).all()


def test_no_token_is_dropped():
    """All to two experts; the others get none, and their gradient is zero."""
    m, x = mixture(), torch.randn(40, 32)
    m.router.selection_bias[[1, 4]] = 10.0
    assert (m(x) - by_definition(m, x)).abs().max() < 1e-5
    m(x).sum().backward()
    assert (m.experts.down_proj.grad.flatten(1).abs().amax(1) > 0).tolist() == [False, True, False, False, True]


def test_without_a_shared_expert():
    m, x = mixture(), torch.randn(40, 32)
    both, shared, m.shared = m(x), m.shared(x), None
    torch.testing.assert_close(m(x) + shared, both)


def test_the_bias_chooses_and_weighs_nothing():
    m, x = mixture(top_k=5), torch.randn(9, 32)
    before = m(x)
    m.router.selection_bias.uniform_()
    p, chosen = m.router(x)
    torch.testing.assert_close(p.gather(1, chosen.argsort(1)), (x @ m.router.weight.T).softmax(1))
    torch.testing.assert_close(m(x), before)


def test_the_router_is_fp32_under_autocast():
    m, x = mixture(), torch.randn(9, 32)
    p, chosen = m.router(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_bytes_equal(m.router(x)[0], p)
        assert m(x).dtype == torch.float32


def test_balance_counts_and_moves():
    m = mixture(experts=4, top_k=1)
    balance = Balance(m, rate=0.25)
    nn.init.zeros_(m.router.weight)
    m(torch.randn(8, 32))
    m.eval()(torch.randn(5, 32))  # neither these …
    m.train()
    with torch.no_grad():  # … nor those are training
        m(torch.randn(5, 32))
    assert balance.step() == {"load_max": 4.0, "load_min": 0.0}
    assert m.router.selection_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]
    assert not m.router.selection_bias.requires_grad
    assert Balance(nn.Linear(2, 2)).step() == {}


def test_balance_evens_out():
    """A router that is set in its ways: one expert has most of the tokens, until the bias has found its place."""
    torch.manual_seed(0)
    shape = Shape(layers=1, d=32, heads=2, ffn=32, context=8, experts=8, top_k=2, expert_ffn=32)
    router, x = Router(shape), torch.randn(512, 32)
    x[:, 0] = 1.0
    nn.init.normal_(router.weight, std=0.1)
    router.weight.data[2, 0] += 2.0
    balance = Balance(nn.Sequential(router), rate=5e-3)
    loads = []
    for _ in range(150):
        router(x)
        loads.append(balance.step())
    assert loads[0]["load_max"] > 3.5 and loads[0]["load_min"] < 0.6
    assert loads[-1]["load_max"] < 1.3 and loads[-1]["load_min"] > 0.7


# What sampler and trainer choose


@pytest.mark.parametrize("policy", ["bf16", "nvidia", "end_to_end"])
def test_sampler_and_trainer_choose_the_same_experts(policy):
    """Experts and weights, to the byte: requests that come and go through a cache, and whole padded sequences."""
    m = model(policy, MOE)
    seen = {}

    def watch(root, side):
        for name, module in root.named_modules():
            if isinstance(module, Router):
                module.register_forward_hook(lambda r, x, out, n=name: side.setdefault(n, []).append((x[0], *out)))

    sampler = Sampler(m, slots=3)
    watch(sampler.model, seen.setdefault("sampler", {}))
    done = sampler.generate([Request(tuple(range(1 + 5 * i)), most=9, stream=i) for i in range(6)])
    watch(m, seen.setdefault("trainer", {}))
    rows = torch.zeros(len(done), MOE.context, dtype=torch.int64)
    for row, c in zip(rows, done, strict=True):
        whole = torch.tensor([*c.request.prompt, *c.tokens])
        row[: len(whole)] = whole
    with running("bf16", "rl_trainer"):
        m(rows)
    assert len(seen["trainer"]) == MOE.layers
    read = sum(len(c.request.prompt) + len(c.tokens) - 1 for c in done)  # nothing reads the last token
    for name, ((x, p, chosen),) in seen["trainer"].items():
        # A token is known by its input, to the bit.
        known = {a.numpy().tobytes(): (b, c) for a, b, c in zip(x, p, chosen, strict=True)}
        same = 0
        for xs, ps, cs in seen["sampler"][name]:
            for a, b, c in zip(xs, ps, cs, strict=True):
                if a.numpy().tobytes() in known:  # not so the padding of a ragged batch
                    wanted = known[a.numpy().tobytes()]
                    assert_bytes_equal(b, wanted[0], name)
                    assert torch.equal(c, wanted[1])
                    same += 1
        assert same >= read


@pytest.mark.parametrize("policy", ["bf16", "end_to_end"])
def test_nobodys_tokens_depend_on_company(policy):
    """18 requests in 18 and 5 slots, backwards, and one alone: the same tokens and log-probs; the trainer's too."""
    m, asked = model(policy, MOE), requests()
    wanted = Sampler(m, slots=18).generate(asked)
    assert len({c.tokens for c in wanted}) > 6
    same(Sampler(m, slots=5).generate(asked), wanted)
    sampler = Sampler(m, slots=7)
    same(sampler.generate(asked[::-1])[::-1], wanted)
    same(sampler.generate(asked[4:5]), wanted[4:5])
    rows = torch.zeros(len(wanted), MOE.context, dtype=torch.int64)
    for row, c in zip(rows, wanted, strict=True):
        whole = torch.tensor([*c.request.prompt, *c.tokens])
        row[: len(whole)] = whole
    with running("bf16", "rl_trainer"):
        logprobs = m(rows).log_softmax(-1)
    for i, c in enumerate(wanted):
        at = torch.arange(len(c.tokens)) + len(c.request.prompt) - 1
        assert_bytes_equal(logprobs[i, at, list(c.tokens)], torch.tensor(c.logprobs), f"request {i}")


def test_packed_weights_are_small():
    """The sampler holds linear layers and experts in 4.5 bits a weight."""
    m = model("end_to_end", MOE)
    quantized = sum(
        p.numel() for x in m.modules() if isinstance(x, (fp4ext.Linear, fp4ext.Experts)) for p in x.parameters()
    )
    small, large = Sampler(m).nbytes, Sampler(model("bf16", MOE)).nbytes
    outer = 4 * MOE.layers * (4 + 2 * MOE.experts)
    assert small == large - 4 * quantized + quantized * 9 // 16 + outer


def test_refit_takes_the_bias_too():
    m = model("end_to_end", MOE)
    sampler, asked = Sampler(m), [Request((1, 2, 3), most=20, stream=i) for i in range(4)]
    before = sampler.generate(asked)
    for module in m.modules():
        if isinstance(module, Router):
            module.selection_bias.copy_(torch.linspace(1, -1, MOE.experts))
    assert sampler.generate(asked) == before
    sampler.refit(m)
    after = sampler.generate(asked)
    assert after == Sampler(m).generate(asked) and after != before


# Training runs


@pytest.fixture
def moe_micro(text):
    def make(policies=("bf16",), **changes):
        return Config(MOE_MICRO.with_(**changes), policies=policies, data=[text], threads=1)

    return make


def test_learns_and_tells(moe_micro, tmp_path):
    """In BF16 and in 4 bits; weights load into a plain model; the report shows the balance."""
    policies = ("bf16", "nvidia", "end_to_end")
    result = pretrain(moe_micro(policies, steps=30, eval_every=30), tmp_path / "run", tensorboard=False)
    page = result.report.read_text()
    assert "Balance of the experts" in page and "expert load" in page
    for row in result.rows:
        assert row.final_loss < 4.2 < 5.5 < row.start_loss
        assert 0 <= row.load_min <= 1 <= row.load_max <= MOE_MICRO.shape.experts
        assert row.converted == (0 if row.policy == "bf16" else 10)
    lines = [line for line in metrics(tmp_path / "run") if "load_max" in line]
    assert len(lines) == 90 and all(line["load_min"] <= 1 <= line["load_max"] for line in lines)
    for policy in policies:
        path = checkpoint.latest(tmp_path / "run" / "checkpoints") / f"{policy}.weights.safetensors"
        Transformer(MOE_MICRO.shape).load_state_dict(safetensors.torch.load_file(path), strict=True)


def test_resume_is_bit_for_bit(moe_micro, tmp_path):
    """The selection bias is state."""
    policies = ("bf16", "end_to_end")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(moe_micro(policies), whole, tensorboard=False)
    pretrain(moe_micro(policies), parts, show=InterruptAt(3), tensorboard=False)
    bias = checkpoint.load(parts / "checkpoints")[1]["end_to_end.weights"]["blocks.1.mlp.router.selection_bias"]
    assert bias.abs().max() > 0
    resume(parts, tensorboard=False)
    assert metrics(parts) == metrics(whole)
    same_checkpoint(parts, whole)


def test_a_dense_run_is_what_it_was(micro):
    config = micro()
    assert not {"experts", "top_k", "expert_ffn"} & config.as_dict()["preset"]["shape"].keys()
    assert Config.from_dict(config.as_dict(), config.data) == config
    assert "selection_bias" not in "".join(Transformer(MICRO.shape).state_dict())


def test_a_config_keeps_the_experts(moe_micro):
    config = moe_micro()
    assert Config.from_dict(config.as_dict(), config.data) == config


def test_the_preset():
    shape = PRESETS["moe-tiny"].shape
    assert (shape.experts, shape.top_k) == (8, 2)
    report = fp4ext.convert(Transformer(shape), "end_to_end")
    assert len(report.converted) == 5 * shape.layers
    assert {name for name in report.left if "router" in name} == {f"blocks.{i}.mlp.router" for i in range(shape.layers)}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"experts": 4, "top_k": 5, "expert_ffn": 32}, "shape.top_k: 5; accepted: a whole number from 1 to 4"),
        ({"experts": 4, "top_k": 2}, "shape.expert_ffn: 0; accepted: a whole number from 1"),
        ({"top_k": 2}, "shape.top_k: 2; accepted: a whole number from 0 to 0"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(Refused, match=words):
        replace(MICRO.shape, **changes)
