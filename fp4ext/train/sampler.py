"""Batched sampling from a packed model: what RL's rollouts, and anyone with prompts, call.

    admit     requests that wait take free slots, up to `slots`; their prompts are read in one ragged batch
    decode    every running request gets one token from one batched step over the cache
    leave     at a stop token, at its length limit or at the end of the context; the last slot moves into the hole

A request's tokens and log-probs are a function of the weights and of that request: the kernels are row-invariant, and
its random numbers come from a stream of its own, Philox keyed by (seed, stream). Who else is in the batch, when they
came and in which order does not change a bit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import fp4ext
from fp4ext.errors import Refused

from .models.cache import Past, Store
from .models.transformer import Transformer


@dataclass(frozen=True)
class Request:
    """What to continue, and how.

    Attributes:
        prompt: token ids, one or more.
        most: the longest completion, in tokens.
        stop: token ids that end it; the stop token is part of the completion.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: draw from the smallest set of most likely tokens that has this much probability.
        stream: which random stream of the sampler's seed is its own.
    """

    prompt: tuple[int, ...]
    most: int = 64
    stop: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    stream: int = 0

    def __post_init__(self):
        if not self.prompt:
            raise Refused("prompt: empty; accepted: one token or more")
        if self.most < 1:
            raise Refused(f"most: {self.most}; accepted: 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise Refused(f"temperature: {self.temperature}; accepted: 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise Refused(f"top_p: {self.top_p}; accepted: more than 0, up to 1")


@dataclass(frozen=True)
class Completion:
    """What came of a request.

    Attributes:
        tokens: without the prompt.
        logprobs: of each token under softmax(logits / temperature), before top-p cuts; of the logits themselves where
            the temperature is 0.
        finished: whether a stop token ended it, rather than its limit or the context's end.
    """

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool


@dataclass
class _Running:
    request: Request
    index: int  # among the requests of the call
    draws: np.ndarray  # uniforms, one a token
    tokens: list[int]
    logprobs: list[float]


class Sampler:
    """A packed copy of a model, its cache and its batch.

    Args:
        model: a Transformer, converted by a policy or plain, its plain Linears served by `invariant`. It is not kept.
        slots: how many requests run at a time.
        seed: of the random streams.
        dtype: of activations, torch.bfloat16 or torch.float32; and of the cache, unless model.set_cache chose a format.

    Attributes:
        tokens, seconds: how many tokens it has sampled, and how long that took.
    """

    def __init__(self, model: Transformer, slots: int = 64, seed: int = 0, dtype: torch.dtype = torch.bfloat16):
        self.model, self.slots, self.seed, self.dtype = fp4ext.pack(model), slots, seed, dtype
        shape = model.shape
        spec = model.blocks[0].attention.cache
        size = (shape.layers, slots, shape.heads, shape.context, shape.head_dim)
        self.keys, self.values = Store.empty(*size, spec, dtype), Store.empty(*size, spec, dtype)
        self.lengths = torch.zeros(slots, dtype=torch.int64)
        self.context = shape.context
        self.tokens, self.seconds = 0, 0.0

    def refit(self, model: Transformer) -> None:
        """Take over the model's present weights, in place."""
        fp4ext.refit(self.model, model)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are read."""
        packed = sum(w.nbytes for w in fp4ext.packed_weights(self.model))
        return packed + sum(p.nbytes for p in self.model.parameters())

    def generate(
        self, requests: Iterable[Request], each: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        """Complete every request; completions in the order of requests.

        Args:
            each: called with (index, completion) as they finish.

        Raises:
            Refused: a prompt that leaves no room in the context, before anything is computed.
        """
        waiting = deque(self._begin(i, request) for i, request in enumerate(requests))
        done: dict[int, Completion] = {}
        running: list[_Running] = []
        began = time.perf_counter()
        with fp4ext.stage("rl_sampler"), torch.no_grad(), self._autocast():
            while waiting or running:
                admitted = [waiting.popleft() for _ in range(min(self.slots - len(running), len(waiting)))]
                if running:
                    self._choose(running, self._decode(running))
                if admitted:
                    logits = self._prefill(admitted, first=len(running))
                    self._choose(admitted, logits)
                    running += admitted
                for slot in reversed(range(len(running))):
                    completion = self._ended(running[slot])
                    if completion:
                        done[running[slot].index] = completion
                        self.tokens += len(completion.tokens)
                        if each:
                            each(running[slot].index, completion)
                        self._free(slot, running)
        self.seconds += time.perf_counter() - began
        return [done[i] for i in range(len(done))]

    def _autocast(self):
        return torch.autocast("cpu", torch.bfloat16, self.dtype == torch.bfloat16)

    def _begin(self, index: int, request: Request) -> _Running:
        if len(request.prompt) >= self.context:
            raise Refused(f"prompt: {len(request.prompt)} tokens; accepted: fewer than the context's {self.context}")
        key = np.array([self.seed, request.stream], dtype=np.uint64)
        draws = np.random.Generator(np.random.Philox(key=key)).random(min(request.most, self.context))
        return _Running(request, index, draws, [], [])

    def _past(self, first: int, end: int, reach: int) -> Past:
        """The cache of slots first … end-1, as far as its longest sequence will reach."""
        window = self.keys.slots(first, end, reach), self.values.slots(first, end, reach)
        return Past(*window, self.lengths[first:end].clone())

    def _prefill(self, admitted: list[_Running], first: int) -> Tensor:
        """Read prompts of any lengths into slots `first` on; the logits after each. What a shorter prompt's padding
        writes is overwritten before anything reads it."""
        lengths = torch.tensor([len(r.request.prompt) for r in admitted])
        tokens = torch.zeros(len(admitted), int(lengths.max()), dtype=torch.int64)
        for row, r in zip(tokens, admitted, strict=True):
            row[: len(r.request.prompt)] = torch.tensor(r.request.prompt)
        end = first + len(admitted)
        self.lengths[first:end] = 0
        logits = self.model(tokens, past=self._past(first, end, tokens.shape[1]))
        self.lengths[first:end] = lengths
        return logits[torch.arange(len(admitted)), lengths - 1]

    def _decode(self, running: list[_Running]) -> Tensor:
        """The logits after each running request's last token."""
        n = len(running)
        tokens = torch.tensor([[r.tokens[-1]] for r in running])
        logits = self.model(tokens, past=self._past(0, n, int(self.lengths[:n].max()) + 1))
        self.lengths[:n] += 1
        return logits[:, 0]

    def _choose(self, running: list[_Running], logits: Tensor) -> None:
        """Give each request its next token and the token's log-prob."""
        temperature = torch.tensor([r.request.temperature or 1.0 for r in running])
        logprobs = (logits / temperature[:, None]).log_softmax(-1)
        chosen = draw(
            logprobs,
            torch.tensor([r.draws[len(r.tokens)] for r in running]),
            torch.tensor([r.request.top_p for r in running]),
        )
        greedy = torch.tensor([r.request.temperature == 0 for r in running])
        chosen = torch.where(greedy, logits.argmax(-1), chosen)
        picked = logprobs.gather(-1, chosen[:, None])[:, 0]
        for r, token, logprob in zip(running, chosen.tolist(), picked.tolist(), strict=True):
            r.tokens.append(token)
            r.logprobs.append(logprob)

    def _ended(self, r: _Running) -> Completion | None:
        finished = r.tokens[-1] in r.request.stop
        full = len(r.request.prompt) + len(r.tokens) >= self.context
        if not (finished or full or len(r.tokens) == r.request.most):
            return None
        return Completion(r.request, tuple(r.tokens), tuple(r.logprobs), finished)

    def _free(self, slot: int, running: list[_Running]) -> None:
        """Let the last running request move into the slot."""
        last = len(running) - 1
        if slot != last:
            reach = int(self.lengths[last])
            self.keys.move(last, slot, reach)
            self.values.move(last, slot, reach)
            self.lengths[slot] = self.lengths[last]
            running[slot] = running[last]
        running.pop()


def draw(logprobs: Tensor, uniform: Tensor, top_p: Tensor) -> Tensor:
    """One token a row by inverting the distribution function: rows [n, vocab], uniforms in [0, 1) fp64 [n] -> [n].

    Tokens count from the most likely one down, equal ones in order of their ids, as far as top_p reaches.
    """
    p, order = logprobs.double().exp().sort(stable=True, dim=-1, descending=True)
    upto = p.cumsum(-1)
    # The first token always counts; then those before which less than top_p has been reached.
    kept = (upto - p < top_p[:, None]).sum(-1, keepdim=True)
    mass = upto.gather(-1, kept - 1)
    place = (upto <= uniform[:, None] * mass).sum(-1, keepdim=True).minimum(kept - 1)
    return order.gather(-1, place)[:, 0]
