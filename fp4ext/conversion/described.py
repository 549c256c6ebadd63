"""The model that a config.json of transformers describes, on the meta device: names, classes and shapes, no weights.

Only classes that transformers itself has are built, never code that a folder brings.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

Config = dict[str, Any]  # a config.json
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")


def by_class(config: Config, most: int) -> tuple[nn.Module | None, str]:
    """(the model of the class that a config names, or None; that class, or why there is none).

    Args:
        most: layers that it may have: a stranger's config.json may ask for any number.
    """
    said = config.get("architectures")
    name = said[0] if isinstance(said, list) and said and isinstance(said[0], str) else None
    if name is None or not isinstance(config.get("model_type"), str):
        return None, "config.json names no class of transformers"
    layers = max((v for k, v in _whole_numbers(config) if k in LAYERS), default=0)
    if layers > most:
        return None, f"config.json says {layers} layers, and there are {most} tensors"
    try:
        import transformers
    except ImportError:
        return None, f"transformers, which has {name}, is not installed"
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return None, f"transformers {transformers.__version__} has no {name}"
    try:
        with torch.device("meta"), _quiet():
            return kind(_read(config)), f"{name} of transformers {transformers.__version__}"
    except Exception as error:  # whatever a class makes of a stranger's config
        return None, f"{name} of transformers cannot be built ({type(error).__name__}: {error})"


def causal(config: Config) -> nn.Module | None:
    """The causal language model of a config, or of the text part of one; None where transformers makes none of it."""
    if not isinstance(config.get("model_type"), str):
        return None
    try:
        import transformers

        with torch.device("meta"), _quiet():
            make: Callable[[Any], nn.Module] = transformers.AutoModelForCausalLM.from_config
            return make(_read(config).get_text_config())
    except Exception:  # not installed, an unknown type, sizes that do not go together
        return None


def _read(config: Config) -> Any:
    """The config object. By way of a file, whose reader knows how infinities are written there."""
    import transformers

    with tempfile.TemporaryDirectory(prefix="fp4ext-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _whole_numbers(config: Config, depth: int = 4) -> Iterator[tuple[str, int]]:
    """(key, value) of the whole numbers in a config and in those inside it."""
    for key, value in config.items():
        if isinstance(value, int):
            yield key, value
        elif isinstance(value, dict) and depth:
            yield from _whole_numbers(value, depth - 1)
