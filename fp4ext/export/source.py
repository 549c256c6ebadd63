"""What `save` takes: a checkpoint, a module, or weights by name; all seen as names with weights behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..functional.qtensor import QTensor
from ..policy.formats import Format
from . import kv_cache, naming
from .checkpoint import AnyWeight, Checkpoint
from .errors import Invalid
from .fp8 import Fp8
from .kv_cache import KvCache
from .stored import Stored


class Source(ABC):
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

    @abstractmethod
    def names(self) -> list[str]:
        """The names of all weights."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a plain weight, or the one in which a quantized weight is used."""

    @abstractmethod
    def format(self, name: str) -> Format | None:
        """The Format, None for a plain or FP8 weight."""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """Bytes that the weight takes."""

    @abstractmethod
    def weight(self, name: str) -> AnyWeight:
        """The weight itself."""


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

    def names(self) -> list[str]:
        return list(self.checkpoint)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.checkpoint.dtype(name)

    def format(self, name: str) -> Format | None:
        return self.checkpoint.format(name)

    def nbytes(self, name: str) -> int:
        return self.checkpoint.nbytes(name)

    def weight(self, name: str) -> AnyWeight:
        return self.checkpoint.weight(name)


class InMemory(Source):
    """Weights by name."""

    def __init__(self, weights: Mapping[str, Tensor | QTensor | Stored | Fp8], config: dict | None = None):
        self.weights: dict[str, AnyWeight] = {}
        self.config, self.side_files = config or {}, []
        for name, w in weights.items():
            if not isinstance(name, str) or not isinstance(w, (Tensor, QTensor, Stored, Fp8)):
                raise Invalid(f"weight {name!r} is {type(w).__name__}; accepted: a name → a Tensor or QTensor")
            w = self.weights[name] = Stored.of(w) if isinstance(w, QTensor) else w
            if not isinstance(w, Tensor) and 0 in self.shape(name):
                raise Invalid(f"weight {name!r} is {self.shape(name)}; accepted: a quantized weight that is not empty")
        self.fp8 = {name for name, w in self.weights.items() if isinstance(w, Fp8)}

    def _tensor(self, name: str) -> Tensor | QTensor | Fp8:
        w = self.weights[name]
        return w.q if isinstance(w, Stored) else w

    def names(self) -> list[str]:
        return list(self.weights)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        w = self._tensor(name)
        return w.codes.dtype if isinstance(w, Fp8) else w.dtype

    def format(self, name: str) -> Format | None:
        w = self._tensor(name)
        return w.format if isinstance(w, QTensor) else None

    def nbytes(self, name: str) -> int:
        return self._tensor(name).nbytes

    def weight(self, name: str) -> AnyWeight:
        return self.weights[name]


def source_of(source: object) -> Source:
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
