"""One arm of an RL run: a trainer, its sampler, and one step of both.

    rollout    prompts(seed, step), a group of completions each, from the packed sampler; rewards from the task
    measure    the trainer's log-probs of the same tokens: how far it disagrees with its sampler
    update     the objective of fp4ext.rl over minibatches of whole groups, backward through stage "rl_trainer"
    refit      new codes into the sampler, in place

Prompts, random streams and the order of minibatches are functions of (seed, step): arms see the same, and a resumed run
goes on bit for bit.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import fp4ext
from fp4ext import rl

from .. import task
from ..models import build
from ..runs import checkpoint
from ..runs.presets import Shape
from ..sampler import Completion, Request
from ..whole import Whole, sampler_of, shaped
from . import correction
from .arms import choose
from .config import Config

EVALUATION = 2**32  # where the random streams of evaluations begin


@dataclass(frozen=True)
class Batch:
    """Sampled sequences, padded: tokens [n, time]; mask and rollout log-probs of the predicted ones, [n, time - 1]."""

    tokens: Tensor
    mask: Tensor
    rollout: Tensor

    @classmethod
    def of(cls, done: list[Completion]) -> Batch:
        time = max(len(c.request.prompt) + len(c.tokens) for c in done)
        tokens = torch.zeros(len(done), time, dtype=torch.int64)
        mask = torch.zeros(len(done), time - 1, dtype=torch.bool)
        rollout = torch.zeros(len(done), time - 1)
        for i, c in enumerate(done):
            begin, end = len(c.request.prompt), len(c.request.prompt) + len(c.tokens)
            tokens[i, :end] = torch.tensor([*c.request.prompt, *c.tokens])
            mask[i, begin - 1 : end - 1] = True
            rollout[i, begin - 1 : end - 1] = torch.tensor(c.logprobs)
        return cls(tokens, mask, rollout)

    def pick(self, rows: Tensor) -> Batch:
        return Batch(self.tokens[rows], self.mask[rows], self.rollout[rows])


class Learner:
    """An arm being reinforced.

    Args:
        kind: of model, as in a Preset.

    Attributes:
        policy: the arm's name.
        diverged: the step at which a loss or gradient stopped being finite, or None. It rests from then on.
    """

    def __init__(self, name: str, config: Config, shape: Shape, weights: dict[str, Tensor], kind: str = "transformer"):
        self.policy, self.config, self.choice = name, config, choose(name, config.chosen)
        self.task = task.load(config.task)
        made = lambda policy: build.of_weights(kind, shape, weights, policy, config.kv_cache)  # noqa: E731
        self.model = made(self.choice.trainer)
        same = self.choice.sampler == self.choice.trainer
        source = self.model if same else made(self.choice.sampler)
        self.sampler = sampler_of(source, slots=config.slots, seed=config.seed)
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if config.kl_coef else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.objective = rl.Objective(
            low=min(config.clip, 1.0), high=config.clip, mean=config.level, kl_coef=config.kl_coef
        )
        self.diverged: int | None = None

    def step(self, step: int) -> dict:
        """Update `step` (from 0). Returns the line for metrics.jsonl, whose step counts updates done."""
        c, line = self.config, {"step": step + 1, "arm": self.policy}
        if self.diverged is not None:
            return line | {"diverged": self.diverged}
        began = time.perf_counter()
        torch.manual_seed(int(task.generator(c.seed, step, 1).integers(2**63)))
        rng = task.generator(c.seed, step)
        prompts = [self.task.prompt(rng) for _ in range(c.prompts)]
        done, rewards = self.rollout([p for p in prompts for _ in range(c.group)], step * c.prompts * c.group)
        sampled = time.perf_counter()
        batch = Batch.of(done)
        old, entropy = self.logprobs(batch)
        measured = rl.disagreement(old, batch.rollout, batch.mask)
        advantage = rl.advantages(rewards, c.group)
        weight = correction.weight(self.choice.guard, old - batch.rollout, batch.mask)
        anchor = self.logprobs(batch, self.reference)[0] if self.reference else None
        clipped, norms = [], []
        for rows in self._minibatches(rng):
            clip, norm = self._update(batch, rows, old, advantage, weight, anchor)
            clipped.append(clip)
            norms.append(norm)
            if not math.isfinite(norm):
                self.diverged = line["diverged"] = step + 1
                break
        self.sampler.refit(self.model)
        lengths = torch.tensor([len(d.tokens) for d in done], dtype=torch.float64)
        line |= correction.measures(measured) | {
            "critic/rewards/mean": rewards.mean().item(),
            "response_length/mean": lengths.mean().item(),
            "actor/entropy": entropy,
            "actor/pg_clipfrac": sum(clipped) / len(clipped),
            "actor/grad_norm": norms[-1] if math.isfinite(norms[-1]) else None,
            "perf/tokens_per_second": lengths.sum().item() / (sampled - began),
        }
        line["seconds"] = round(time.perf_counter() - began, 6)
        if alarms := rl.guard(measured):
            line["alarms"] = alarms
        return line

    def evaluate(self) -> float:
        """The mean reward of fresh completions of the same prompts, at every call."""
        rng = task.generator(self.config.seed, EVALUATION)
        prompts = [self.task.prompt(rng) for _ in range(self.config.eval_prompts)]
        return self.rollout(prompts, EVALUATION)[1].mean().item()

    def rollout(self, prompts: list[str], stream: int) -> tuple[list[Completion], Tensor]:
        """A completion of each prompt, and its reward."""
        stop = (self.task.stop.encode()[0],)
        requests = [
            Request(tuple(p.encode()), self.task.most, stop, self.config.temperature, stream=stream + i)
            for i, p in enumerate(prompts)
        ]
        done = self.sampler.generate(requests)
        texts = [bytes(c.tokens).decode("utf-8", "replace") for c in done]
        return done, torch.tensor([float(self.task.reward(p, text)) for p, text in zip(prompts, texts, strict=True)])

    @torch.no_grad()
    def logprobs(self, batch: Batch, model: nn.Module | None = None) -> tuple[Tensor, float]:
        """The trainer's log-probs of the batch's tokens [n, time - 1], and its mean entropy where some were sampled."""
        parts, entropies = [], []
        whole = isinstance(self.sampler, Whole)
        for rows in torch.arange(len(batch.tokens)).split(self.config.slots if whole else self.config.rows):
            tokens = batch.tokens[rows]
            given = shaped(tokens, self.config.slots, self.sampler.length) if whole else tokens
            every = self._forward(given, model or self.model)[: len(rows), : tokens.shape[1] - 1]
            parts.append(every.gather(-1, batch.tokens[rows, 1:, None])[..., 0])
            entropies.append(-(every.exp() * every).sum(-1)[batch.mask[rows]])
        return torch.cat(parts), torch.cat(entropies).mean().item()

    def _forward(self, tokens: Tensor, model: nn.Module) -> Tensor:
        with fp4ext.stage("rl_trainer"):
            logits = build.logits(model, tokens)[:, :-1]
        return (logits / self.config.temperature).log_softmax(-1)

    def _minibatches(self, rng: np.random.Generator) -> list[Tensor]:
        """Whole groups, shuffled and dealt into `updates` parts."""
        groups = torch.from_numpy(rng.permutation(self.config.prompts)).tensor_split(self.config.updates)
        inside = torch.arange(self.config.group)
        return [(part[:, None] * self.config.group + inside).flatten() for part in groups if len(part)]

    def _update(self, batch: Batch, rows: Tensor, old, advantage, weight, anchor) -> tuple[float, float]:
        part = batch.pick(rows)
        every = self._forward(part.tokens, self.model)
        logprobs = every.gather(-1, part.tokens[:, 1:, None])[..., 0]
        anchor = None if anchor is None else anchor[rows]
        loss, clipped = self.objective.loss(logprobs, old[rows], advantage[rows], part.mask, weight[rows], anchor)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return clipped.item(), norm

    def files(self):
        """What a checkpoint keeps of it, as (file name, tensors)."""
        return checkpoint.files_of(self.policy, self.model, self.optimizer)

    def load(self, files: dict[str, dict[str, Tensor]], diverged: dict[str, int | None]) -> None:
        """Take over what `files` gave, and where each arm diverged."""
        self.diverged = diverged[self.policy]
        checkpoint.take_over(files, self.policy, self.model, self.optimizer)
        self.sampler.refit(self.model)
