"""The sampler: the model's own distribution, and nobody's tokens depend on company."""

import pytest
import torch

import fp4ext
from fp4ext.testing import assert_bytes_equal
from fp4ext.train import Refused
from fp4ext.train.sampler import Request, Sampler, draw

from .test_invariance import DTYPES, SHAPE, model, running

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [(7,), (1, 2, 3, 4, 5), tuple(range(20)), (250, 3), tuple(range(46)), (9, 9, 9)]


def requests(**changes):
    given = {"most": 12, "stop": (17, 80)} | changes
    return [Request(prompt, stream=i, **given) for i, prompt in enumerate(PROMPTS * 3)]


def same(got, wanted):
    assert [c.tokens for c in got] == [c.tokens for c in wanted]
    assert [c.logprobs for c in got] == [c.logprobs for c in wanted]  # to the bit
    assert [c.finished for c in got] == [c.finished for c in wanted]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", ["bf16", "end_to_end"])
def test_company_order_and_slots_do_not_matter(policy, dtype):
    """18 requests in 18, 5 and 1 slots, backwards, and one alone: the same tokens and log-probs."""
    m, asked = model(policy), requests()
    wanted = Sampler(m, slots=18, dtype=DTYPES[dtype]).generate(asked)
    assert len({c.tokens for c in wanted}) > 6 and {c.finished for c in wanted} == {True, False}
    same(Sampler(m, slots=5, dtype=DTYPES[dtype]).generate(asked), wanted)
    same(Sampler(m, slots=1, dtype=DTYPES[dtype]).generate(asked[:6]), wanted[:6])
    sampler = Sampler(m, slots=7, dtype=DTYPES[dtype])
    same(sampler.generate(asked[::-1])[::-1], wanted)
    same(sampler.generate(asked[4:5]), wanted[4:5])  # a used cache does not matter either


@pytest.mark.parametrize("policy", ["bf16", "nvidia", "end_to_end"])
def test_logprobs_are_the_trainers(policy):
    """The trainer's forward over the whole padded batch gives the very bits that decoding gave."""
    m = model(policy)
    done = Sampler(m, slots=4).generate(requests(temperature=0.8))
    rows = torch.zeros(len(done), SHAPE.context, dtype=torch.int64)
    for row, c in zip(rows, done, strict=True):
        whole = torch.tensor([*c.request.prompt, *c.tokens])
        row[: len(whole)] = whole
    with running("bf16", "rl_trainer"):
        logprobs = (m(rows) / 0.8).log_softmax(-1)
    for i, c in enumerate(done):
        at = torch.arange(len(c.tokens)) + len(c.request.prompt) - 1
        assert_bytes_equal(logprobs[i, at, list(c.tokens)], torch.tensor(c.logprobs), f"request {i}")


def test_ends():
    """At a stop token, at `most`, at the end of the context; finished says which."""
    m = model("bf16")
    free = Sampler(m).generate(requests(stop=(), most=100))
    assert all(len(c.request.prompt) + len(c.tokens) == SHAPE.context and not c.finished for c in free)
    stop = free[0].tokens[3]
    c = Sampler(m).generate([Request(PROMPTS[0], most=100, stop=(stop,))])[0]
    assert c.finished and c.tokens == free[0].tokens[: free[0].tokens.index(stop) + 1]
    c = Sampler(m).generate([Request(PROMPTS[0], most=2)])[0]
    assert not c.finished and c.tokens == free[0].tokens[:2]


def test_greedy():
    m = model("bf16")
    c = Sampler(m, dtype=torch.float32).generate([Request((5, 6), most=6, temperature=0)])[0]
    tokens = [5, 6]
    with running("fp32"):
        for token, logprob in zip(c.tokens, c.logprobs, strict=True):
            logits = m(torch.tensor([tokens]))[0, -1]
            assert token == logits.argmax() and logprob == logits.log_softmax(-1).max().item()
            tokens.append(token)


def test_streams_and_seeds():
    m = model("bf16")
    one = lambda seed, stream: Sampler(m, seed=seed).generate([Request((5,), most=30, stream=stream)])[0].tokens  # noqa: E731
    assert one(0, 1) == one(0, 1)
    assert len({one(0, 1), one(0, 2), one(1, 1)}) == 3


def test_refit():
    m = model("end_to_end")
    sampler = Sampler(m)
    before = sampler.generate(requests())
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1.1).add_(0.01 * torch.randn(p.shape))
    fresh = Sampler(m).generate(requests())
    sampler.refit(m)
    same(sampler.generate(requests()), fresh)
    assert fresh != before


def test_weights_are_packed():
    linear = sum(x.weight.numel() for x in model("end_to_end").modules() if isinstance(x, fp4ext.Linear))
    small, large = Sampler(model("end_to_end")).nbytes, Sampler(model("bf16")).nbytes
    assert 0 <= small - (large - 4 * linear + linear * 9 / 16) <= 64


def test_draw():
    """Frequencies within 5 standard errors; top-p cuts the tail and keeps the token that crosses it."""
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0)).double()
    cut = {1.0: p, 0.69: torch.tensor([0, 4 / 7, 0, 3 / 7]), 0.71: torch.tensor([0, 4 / 9, 2 / 9, 3 / 9])}
    for top_p, wanted in cut.items():
        got = draw(p.log().expand(20_000, 4), uniform, torch.full((20_000,), top_p, dtype=torch.float64))
        share = got.bincount(minlength=4) / 20_000
        assert ((share - wanted).abs() <= 5 * (wanted * (1 - wanted) / 20_000).sqrt()).all()
    ends = draw(p.log().expand(3, 4), torch.tensor([0.0, 1 - 2**-53, 0.4]).double(), torch.ones(3).double())
    assert ends.tolist()[:2] == [1, 0]
    assert draw(p.log()[None], torch.tensor([0.9999]), torch.tensor([1e-9])).item() == 1


def test_progress_and_speed():
    seen, sampler = [], Sampler(model("bf16"), slots=4)
    done = sampler.generate(requests(), each=lambda i, c: seen.append((i, c)))
    assert sorted(i for i, _ in seen) == list(range(18)) and dict(seen)[3] is done[3]
    assert sampler.tokens == sum(len(c.tokens) for c in done) and sampler.seconds > 0
    assert sampler.generate([]) == []


@pytest.mark.parametrize(
    "given, words",
    [
        ({"prompt": ()}, "prompt: empty; accepted"),
        ({"most": 0}, "most: 0; accepted: 1 or more"),
        ({"temperature": -1.0}, "temperature: -1.0; accepted: 0"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": 0.0}, "top_p: 0.0; accepted: more than 0, up to 1"),
    ],
)
def test_refusals(given, words):
    with pytest.raises(Refused, match=words):
        Request(**({"prompt": (1,)} | given))


def test_refuses_a_prompt_without_room():
    with pytest.raises(Refused, match="prompt: 48 tokens; accepted: fewer than the context's 48"):
        Sampler(model("bf16")).generate([Request((1,)), Request((1,) * 48)])
