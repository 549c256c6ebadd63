"""Sampling without a cache, from a model whose sums torch orders by a batch's shape: every forward has the same shape.

    a forward      slots × (the longest prompt + the longest completion) tokens, zeros where there are none yet
    a token        the logits at a sequence's last place; it is written behind it, and all of it is read again
    the next slots once every sequence of these has ended

A causal model gives a place the same bits whatever stands behind it, and torch a row the same bits whatever stands in
the other rows. So a trainer that reads finished sequences in that shape, each in its row, sees what was sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import fp4ext

from .models.transformer import Transformer
from .sampler import Completion, Request, Sampler


class Whole(Sampler):
    """As Sampler, for any causal model of (tokens) -> logits, or an object that has them.

    Attributes:
        length: of the sequences in the last call, padding included.
    """

    def __init__(self, model: nn.Module, slots: int = 64, seed: int = 0):
        self.model, self.slots, self.seed = fp4ext.pack(model), slots, seed
        self.context = model.config.max_position_embeddings
        self.tokens, self.seconds, self.length = 0, 0.0, 0

    def generate(
        self, requests: Iterable[Request], each: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        """See Sampler."""
        waiting = [self._begin(i, request) for i, request in enumerate(requests)]
        longest = max((len(r.request.prompt) + r.request.most for r in waiting), default=0)
        self.length = min(longest, self.context)
        done: dict[int, Completion] = {}
        began = time.perf_counter()
        for first in range(0, len(waiting), self.slots):
            rows = dict(enumerate(waiting[first : first + self.slots]))
            tokens = torch.zeros(self.slots, self.length, dtype=torch.int64)
            for row, r in rows.items():
                tokens[row, : len(r.request.prompt)] = torch.tensor(r.request.prompt)
            while rows:
                ends = {row: len(r.request.prompt) + len(r.tokens) for row, r in rows.items()}
                self._choose(list(rows.values()), self._read(tokens)[list(ends), [e - 1 for e in ends.values()]])
                for row, r in list(rows.items()):
                    completion = self._ended(r)
                    if completion is None:
                        tokens[row, ends[row]] = r.tokens[-1]
                        continue
                    done[r.index] = completion
                    self.tokens += len(completion.tokens)
                    if each:
                        each(r.index, completion)
                    del rows[row]
        self.seconds += time.perf_counter() - began
        return [done[i] for i in range(len(done))]

    def _read(self, tokens: Tensor) -> Tensor:
        with fp4ext.stage("rl_sampler"), torch.no_grad():
            out = self.model(tokens)
        return out if isinstance(out, Tensor) else out.logits


def sampler_of(model: nn.Module, slots: int = 64, seed: int = 0) -> Sampler:
    """What samples from a model of models/build.py, or from a packed copy of one."""
    return (Sampler if isinstance(model, Transformer) else Whole)(model, slots=slots, seed=seed)


def shaped(tokens: Tensor, slots: int, length: int) -> Tensor:
    """Sequences [n, time] as a batch of that shape, zeros around them."""
    out = torch.zeros(slots, length, dtype=tokens.dtype)
    out[: tokens.shape[0], : tokens.shape[1]] = tokens
    return out
