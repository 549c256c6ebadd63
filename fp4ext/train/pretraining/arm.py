"""One arm of a comparison: a model under a policy, its optimizer, and one step of either.

All arms start from the same weights (a function of the seed) and read the same batches. Before each step torch's
generators are seeded from (seed, step): an arm's stochastic rounding does not depend on which arms run beside it, nor
on where a run was stopped.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp4ext
from fp4ext.audit.live import Monitor

from ..models import build
from ..models.moe import Balance
from ..runs import checkpoint
from ..runs.presets import Preset


class Arm:
    """A model being trained under one policy.

    Attributes:
        policy: its name.
        report: which modules the policy took, which it left, and why.
        monitor: the live statistics, where asked for.
        diverged: the step at which a loss or gradient stopped being finite, or None. A diverged arm rests while the
            others go on.
    """

    def __init__(self, policy: str | fp4ext.Policy, preset: Preset, seed: int, device: torch.device, stats: int = 0):
        name = policy if isinstance(policy, str) else policy.name
        self.policy, self.preset, self.seed, self.device = name, preset, seed, device
        self.model, self.report = build.fresh(policy, preset, seed, device)
        self.balance = Balance(self.model)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": preset.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=preset.lr, betas=(0.9, 0.95), fused=True)
        self.diverged: int | None = None
        self.monitor = monitor(self.model, stats)

    def step(self, tokens: Tensor, targets: Tensor, step: int) -> dict:
        """Update `step` (from 0). Returns the line for metrics.jsonl, whose step counts updates done."""
        line: dict = {"step": step + 1, "policy": self.policy}
        if self.diverged is not None:
            return line | {"diverged": self.diverged}
        began = time.perf_counter()
        lr = learning_rate(step, self.preset)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._prepare(step)

        def batch_loss() -> Tensor:
            return F.cross_entropy(self._logits(tokens).flatten(0, 1), targets.flatten().to(self.device))

        watch = self.monitor.watch(step, batch_loss) if self.monitor else nullcontext()
        with watch:
            loss = batch_loss()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.preset.clip)
        train_loss, grad_norm = loss.item(), norm.item()
        if math.isfinite(train_loss) and math.isfinite(grad_norm):
            self.optimizer.step()
            line |= self.balance.step()
        else:
            self.diverged = step + 1
            line["diverged"] = self.diverged
        self.optimizer.zero_grad(set_to_none=True)
        line |= {"train_loss": _finite(train_loss), "grad_norm": _finite(grad_norm), "lr": lr}
        line["seconds"] = round(time.perf_counter() - began, 6)
        return line | (self.monitor.line or {} if self.monitor else {})

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor, step: int) -> np.ndarray:
        """The loss of each window in nats a byte, fp64."""
        self._prepare(step)
        self.model.eval()
        losses = []
        with fp4ext.stage("pretrain"):  # the forward that trains, not that of inference
            for x, y in zip(tokens.split(32), targets.split(32), strict=True):
                logits = self._logits(x)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten().to(self.device), reduction="none")
                losses.append(loss.view(y.shape).double().mean(1).cpu().numpy())
        self.model.train()
        return np.concatenate(losses)

    def files(self):
        """What a checkpoint keeps of it, as (file name, tensors)."""
        return checkpoint.files_of(self.policy, self.model, self.optimizer)

    def load(self, files: dict[str, dict[str, Tensor]], diverged: dict[str, int | None]) -> None:
        """Take over what `files` gave, and where each policy diverged."""
        self.diverged = diverged[self.policy]
        checkpoint.take_over(files, self.policy, self.model, self.optimizer)

    def storage_bits(self) -> dict[str, float]:
        """Bits that an element takes where products read it: weights, and activations saved for backward."""
        return fp4ext.storage_bits(self.model)

    def said(self) -> str:
        """One line: which kinds of modules the policy took from a model that is not ours, and which it left."""
        kinds = {name: type(module).__name__ for name, module in self.model.named_modules()}
        took = Counter(kinds[name] for name in self.report.converted)
        taken = ", ".join(f"{count} {kind}" for kind, count in took.items())
        left = ", ".join(sorted({kinds[name] for name in self.report.left}))
        return f"{self.policy} quantizes of {type(self.model).__name__}: {taken}; leaves: {left}"

    def _logits(self, tokens: Tensor) -> Tensor:
        """fp32 [batch, time, vocab]."""
        return build.logits(self.model, tokens.to(self.device))

    def _prepare(self, step: int) -> None:
        noise = np.random.SeedSequence([self.seed, step]).generate_state(1, np.uint64)[0]
        torch.manual_seed(int(noise >> np.uint64(1)))
        fp4ext.set_step(self.model, step)


def learning_rate(step: int, preset: Preset) -> float:
    """Linear warm-up (a fifth of the run at most), then a cosine from lr to min_lr."""
    warmup = min(preset.warmup, max(1, preset.steps // 5))
    if step < warmup:
        return preset.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, preset.steps - 1 - warmup)
    return preset.min_lr + (preset.lr - preset.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def monitor(model: nn.Module, every: int) -> Monitor | None:
    """What watches the quantizers of a model, where there are any."""
    watched = Monitor(model, every)
    return watched if watched.every and watched.layers else None


def policy_names() -> list[str]:
    """The policies that an arm can be trained under."""
    return fp4ext.policies.names()
