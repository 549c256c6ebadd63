"""Sampling without a cache: a model whose sums torch orders by shape, and a trainer that agrees with it to the bit."""

import pytest
import torch

import fp4ext
from fp4ext.train import Shape
from fp4ext.train.models import build, inkling2
from fp4ext.train.rl import Config
from fp4ext.train.rl.learner import Learner
from fp4ext.train.sampler import Request
from fp4ext.train.whole import sampler_of

pytest.importorskip("transformers", minversion="5.24")

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = Shape(layers=2, d=32, heads=2, ffn=0, context=32, experts=4, top_k=2, expert_ffn=32)
AGREE = ("matched", "bf16", "quantized_backward")


@pytest.fixture(scope="module")
def weights():
    """Of a model that likes some bytes more than others."""
    model = inkling2.build(SHAPE, seed=0)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    return model.state_dict()


@pytest.mark.parametrize("name", [*AGREE, "mismatched"])
def test_agreement(weights, name):
    """Exactly 0 through updates, with slots that the completions do not fill evenly."""
    config = Config(arms=[name], task="arithmetic", threads=1, prompts=5, group=3, slots=7)
    learner = Learner(name, config, SHAPE, weights, "inkling2")
    learner.task.reward = lambda prompt, completion: ord(completion[0]) % 2
    lines = [learner.step(step) for step in range(2)]
    d = [line["rollout_corr/max_abs_d"] for line in lines]
    assert d == [0, 0] if name in AGREE else min(d) > 1e-3, d
    assert all(line["actor/grad_norm"] > 0 for line in lines)


def test_neighbours_do_not_matter(weights):
    """What stands in the other slots, and how long it takes; and a row is what the model says of it."""
    model = build.of_weights("inkling2", SHAPE, weights, fp4ext.policies.get("end_to_end"))
    sampler = sampler_of(model, slots=3)
    mine = Request((49, 43, 50), most=6, temperature=0)
    alone = sampler.generate([mine])[0]
    others = [Request((7,), most=8, temperature=1.5), Request((9, 9), most=2, stream=4)]
    sampler.generate([mine, *others])  # other lengths, another shape
    assert sampler.length == 9
    assert sampler.generate([mine, Request((200, 1, 1), most=6, stream=1)])[0] == alone
    tokens = torch.tensor([[*mine.prompt, *alone.tokens[:-1]]])
    with fp4ext.stage("rl_trainer"), torch.no_grad():
        logprobs = build.logits(model, tokens).log_softmax(-1)[0, 2:]
    assert logprobs.argmax(-1).tolist() == list(alone.tokens)
