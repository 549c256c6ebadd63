"""calibrate: measure the time of each primitive operation on this machine, which is then called `here`.

Each kind of operation is timed at two sizes, and modelled as overhead + work/rate. The operations take turns, and the
median of each counts: on a machine that others use too, the fastest run of a short operation is faster than the same
operation within a whole step.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..functional import ops
from ..functional.gemms import gemm
from ..functional.qtensor import QTensor
from ..functional.quantization import quantize
from ..nn.dense import Linear
from ..policy import policies
from ..policy.spec import Spec
from .operations import Op, of_layer

# M, N, K; a quantizer's rows and columns are the first and the last.
TINY, SMALL, LARGE = (16, 16, 16), (128, 256, 256), (512, 512, 512)
LAYER = "end_to_end"  # the policy whose layer's bookkeeping is timed


@dataclass(frozen=True)
class Here:
    """This machine, as measured.

    Attributes:
        costs: kind and keys of an operation → (seconds per call, seconds per unit of work).
        layer: seconds that a layer's forward and backward spend outside their operations: autograd, checks, RNG state.
    """

    costs: dict[tuple, tuple[float, float]]
    layer: float = 0.0
    name: str = "here"

    def seconds(self, op: Op) -> float:
        """The time of an operation. Raises KeyError for one that was not calibrated."""
        call, unit = self.costs[op.kind, op.keys]
        return call + unit * op.work


def calibrate(
    wanted: Iterable[Op],
    repeats: int = 7,
    large: tuple[int, int, int] = LARGE,
    also: dict[str, Callable[[], object]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Here, dict[str, float]]:
    """Time the kinds of operations that `wanted` has.

    Args:
        repeats: calls of each; their median counts.
        large: the larger of the two sizes (M, N, K).
        also: functions that are timed in the same rounds, to compare what is predicted with what is.
        clock: gives seconds; time.thread_time where others use the machine and torch has one thread.

    Returns:
        The machine, and the seconds of each function of `also`.
    """
    kinds = sorted({(op.kind, op.keys) for op in wanted})
    runs: dict = {}
    for kind, keys in kinds:
        for at, sizes in (("small", SMALL), ("large", large)):
            runs[kind, keys, at] = _run(kind, keys, sizes)
    pieces = of_layer(policies.get(LAYER).pretrain, *TINY)
    runs |= {(op.kind, op.keys, i): _run(op.kind, op.keys, TINY) for i, op in enumerate(pieces)}
    runs["layer"] = _layer_run(), 0
    runs |= {name: (f, 0) for name, f in (also or {}).items()}
    with torch.no_grad():
        for run, _ in runs.values():
            run()
    taken: dict = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (run, _) in runs.items():
            began = clock()
            run()
            taken[name].append(clock() - began)
    typical = {name: statistics.median(times) for name, times in taken.items()}
    costs = {}
    for kind, keys in kinds:
        (fast, little), (slow, much) = ((typical[kind, keys, at], runs[kind, keys, at][1]) for at in ("small", "large"))
        unit = max(slow - fast, 0.2 * slow) / (much - little)
        costs[kind, keys] = max(slow - unit * much, 0.0), unit
    layer = typical["layer"] - sum(typical[op.kind, op.keys, i] for i, op in enumerate(pieces))
    return Here(costs, max(layer, 0.0)), {name: typical[name] for name in also or {}}


def _layer_run() -> Callable[[], object]:
    """A function that takes a tiny layer forward and backward."""
    t, n, k = TINY
    layer = Linear(k, n, bias=False, policy=LAYER, dtype=torch.bfloat16)
    x, dy = torch.ones(t, k, dtype=torch.bfloat16, requires_grad=True), torch.ones(t, n, dtype=torch.bfloat16)

    def run() -> None:
        with torch.enable_grad():
            torch.autograd.grad(layer(x), (x, layer.weight), dy)

    return run


def _run(kind: str, keys: tuple[str, ...], sizes: tuple[int, int, int]) -> tuple[Callable[[], object], int]:
    """A function that does one operation, and its work."""
    m, n, k = sizes
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    rng = torch.tensor([1, 2])
    if kind == "quantize":
        key, axis = keys
        return lambda: ops.quantize(x, key, int(axis), rng), m * k
    if kind == "requantize":
        stored = quantize(x, keys[0]).stored()
        return lambda: ops.requantize(*stored, keys[1], int(keys[2]), rng), m * k
    if kind == "dequantize":
        q = quantize(x, keys[0])
        return lambda: q.dequantize(torch.bfloat16), m * k
    a, b = (_operand(fmt, rows, k) for fmt, rows in zip(keys[:2], (m, n), strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return functools.partial(torch.nn.functional.linear, a, b), m * n * k
    out = torch.float32 if keys[2] == "fp32" else torch.bfloat16
    return lambda: gemm(a, b, None, out), m * n * k


def _operand(fmt: str, rows: int, k: int) -> Tensor | QTensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    return x if fmt == "bf16" else quantize(x, Spec(fmt))
