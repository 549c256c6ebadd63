"""What `save` takes: a checkpoint, a module, or weights by name; all seen as names with weights behind them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..functional.qtensor import QTensor
from ..policy.formats import Format
from . import kv_cache, naming
from .checkpoint import Checkpoint
from .errors import Invalid
from .fp8 import Fp8
from .kv_cache import KvCache
from .stored import Stored


class Source:
    """Names, what is known of each without reading it, and the weights.

    Attributes:
        config: the model's config.json, {} where there is none.
        side_files: files to copy along. aside: name of one that stays behind → why.
        model: the module that it was made of, None where there was none.
        fp8: the names of weights that are FP8 already. kv_cache: the scheme of the KV cache.
        alternating, transposed: whether stacks alternate gate and up by rows; whether plain stacks are [E, K, N].
    """

    config: dict
    side_files: list[Path]
    aside: dict[str, str] = {}
    model: nn.Module | None = None
    fp8: Collection[str] = ()
    kv_cache: KvCache | None = None
    alternating = False
    transposed = False

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def format(self, name: str) -> Format | None: ...

    def nbytes(self, name: str) -> int: ...

    def weight(self, name: str) -> Stored | Tensor: ...


class FromCheckpoint(Source):
    """An opened checkpoint: weights are read as they are asked for."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.config = dict(checkpoint.config)
        self.config.pop("quantization_config", None)
        self.fp8, self.kv_cache = checkpoint.fp8.keys(), kv_cache.of(checkpoint.folder)
        self.side_files, self.aside = checkpoint.folder.side_files(), checkpoint.folder.left_aside()
        self.aside |= {f"metadata {key!r}": "metadata of the files" for key in checkpoint.other_metadata()}
        plain_and_transposed = checkpoint.layout.name == "plain" and self.config.get("model_type") in naming.TRANSPOSED
        self.transposed = self.alternating = checkpoint.layout.transposed or plain_and_transposed
        self.names, self.shape, self.dtype = lambda: list(checkpoint), checkpoint.shape, checkpoint.dtype
        self.format, self.nbytes, self.weight = checkpoint.format, checkpoint.nbytes, checkpoint.weight


class InMemory(Source):
    """Weights by name."""

    def __init__(self, weights: Mapping[str, Tensor | QTensor | Stored], config: dict | None = None):
        self.weights, self.config, self.side_files = dict(weights), config or {}, []
        for name, w in self.weights.items():
            if not isinstance(name, str) or not isinstance(w, (Tensor, QTensor, Stored, Fp8)):
                raise Invalid(f"weight {name!r} is {type(w).__name__}; accepted: a name → a Tensor or QTensor")
            q = w.q if isinstance(w, Stored) else w
            if isinstance(q, (QTensor, Fp8)) and 0 in q.shape:
                raise Invalid(f"weight {name!r} is {tuple(q.shape)}; accepted: a quantized weight that is not empty")
        self.fp8 = {name for name, w in self.weights.items() if isinstance(w, Fp8)}

    def names(self):
        return list(self.weights)

    def shape(self, name):
        w = self.weights[name]
        return tuple((w.q if isinstance(w, Stored) else w).shape)

    def dtype(self, name):
        w = self.weights[name]
        return w.codes.dtype if isinstance(w, Fp8) else (w.q if isinstance(w, Stored) else w).dtype

    def format(self, name):
        w = self.weights[name]
        w = w.q if isinstance(w, Stored) else w
        return w.format if isinstance(w, QTensor) else None

    def nbytes(self, name):
        w = self.weights[name]
        return (w.q if isinstance(w, Stored) else w).nbytes

    def weight(self, name):
        w = self.weights[name]
        return Stored.of(w) if isinstance(w, QTensor) else w


def source_of(source) -> Source:
    """The Source of what a caller gave; of a module: module.of_model.

    Raises:
        Refused: something else.
    """
    if isinstance(source, (str, Path)):
        source = Checkpoint(source)
    if isinstance(source, Checkpoint):
        return FromCheckpoint(source)
    if isinstance(source, Mapping):
        return InMemory(source)
    raise Invalid(f"source is {type(source).__name__}; accepted: a module, a checkpoint's path, or name → weight")
