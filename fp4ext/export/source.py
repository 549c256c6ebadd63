"""What `save` takes: a checkpoint, a module, or weights by name; all seen as names with weights behind them."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from ..convert import CONVERTED
from ..formats import Format
from ..policy import Policy
from ..qtensor import QTensor
from ..quantized import QuantizedExperts, QuantizedLinear, QuantizedStacked
from . import kv_cache, naming
from .checkpoint import Checkpoint
from .errors import Refused
from .fp8 import Fp8
from .fp8_linear import Fp8Linear
from .kv_cache import KvCache
from .stored import Stored


class Source:
    """Names, what is known of each without reading it, and the weights.

    Attributes:
        config: the model's config.json, {} where there is none.
        side_files: files to copy along. aside: name of one that stays behind → why.
        policies: weight name → the policy of the layer it is in, where that has one.
        linear: the names of linear layers' weights, where they are known; None where names must tell.
        fp8: the names of weights that are FP8 already. kv_cache: the scheme of the KV cache.
        alternating, transposed: whether stacks alternate gate and up by rows; whether plain stacks are [E, K, N].
    """

    config: dict
    side_files: list[Path]
    aside: dict[str, str] = {}
    policies: dict[str, Policy]
    linear: set[str] | None = None
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
        self.config, self.policies = dict(checkpoint.config), {}
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
        self.weights, self.config, self.side_files, self.policies = dict(weights), config or {}, [], {}
        for name, w in self.weights.items():
            if not isinstance(name, str) or not isinstance(w, (Tensor, QTensor, Stored, Fp8)):
                raise Refused(f"weight {name!r} is {type(w).__name__}; accepted: a name → a Tensor or QTensor")
            q = w.q if isinstance(w, Stored) else w
            if isinstance(q, (QTensor, Fp8)) and 0 in q.shape:
                raise Refused(f"weight {name!r} is {tuple(q.shape)}; accepted: a quantized weight that is not empty")
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


def of_module(model: nn.Module) -> InMemory:
    """A module's parameters and buffers by their names; packed layers as what they hold."""
    weights: dict[str, Tensor | QTensor] = {}
    linear, policies = set(), {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, QuantizedExperts):
            weights |= {f"{dot}{leaf}": getattr(module, leaf) for leaf in ("gate_up_proj", "down_proj")}
            continue
        if isinstance(module, QuantizedStacked):
            weights |= {f"{dot}{leaf}": module.held(leaf) for leaf in module.stacks}
            weights |= {f"{dot}{leaf}": p.detach() for leaf, p in module.named_parameters(recurse=False)}
            continue
        if isinstance(module, (QuantizedLinear, Fp8Linear)):
            weights[f"{dot}weight"] = module.weight
            if module.bias is not None:
                weights[f"{dot}bias"] = module.bias.detach()
            continue
        own = {name for name, _ in module.named_parameters(recurse=False)} | {
            name for name, _ in module.named_buffers(recurse=False) if name not in module._non_persistent_buffers_set
        }
        weights |= {f"{dot}{name}": getattr(module, name).detach() for name in sorted(own)}
        if isinstance(module, nn.Linear):
            linear.add(f"{dot}weight")
        if isinstance(module, CONVERTED):
            policies |= {f"{dot}{leaf}": module.policy for leaf in own}
    source = InMemory(weights, {"architectures": [type(model).__name__]})
    source.linear, source.policies = linear, policies
    return source


def source_of(source, scratch: ExitStack) -> Source:
    """The Source of what a caller gave.

    A model that saves itself (transformers) knows its checkpoint's names, which are not its modules': it writes a plain
    checkpoint first, which lives as long as `scratch`.

    Raises:
        Refused: something else.
    """
    if isinstance(source, (str, Path)):
        source = Checkpoint(source)
    if isinstance(source, Checkpoint):
        return FromCheckpoint(source)
    if isinstance(source, nn.Module):
        kinds = (QuantizedLinear, QuantizedExperts, QuantizedStacked, Fp8Linear)
        packed = any(isinstance(module, kinds) for module in source.modules())
        if hasattr(source, "save_pretrained") and not packed:
            folder = scratch.enter_context(tempfile.TemporaryDirectory(prefix="fp4ext-"))
            source.save_pretrained(folder)
            written = FromCheckpoint(Checkpoint(folder))
            written.policies = of_module(source).policies
            return written
        return of_module(source)
    if isinstance(source, Mapping):
        return InMemory(source)
    raise Refused(f"source is {type(source).__name__}; accepted: a module, a checkpoint's path, or name → weight")
