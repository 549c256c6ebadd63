"""A model folder of transformers: config.json and safetensors, loaded offline, and batches of text for it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..errors import Refused

SAFE = {"local_files_only": True, "trust_remote_code": False}  # a folder's own code is never run, nor offered


def is_model(folder: Path) -> bool:
    """Whether a folder looks like one: a config.json that names a model type, and safetensors."""
    config = folder / "config.json"
    return config.is_file() and '"model_type"' in config.read_text() and any(folder.glob("*.safetensors"))


def load(
    folder: Path, text: bytes, batches: int = 2, batch: int = 4, context: int = 128
) -> tuple[nn.Module, list[dict]]:
    """The causal language model in a folder, in fp32, and batches of its tokens.

    Args:
        text: cut into windows of `context` tokens; bytes stand for tokens where the folder has no tokenizer.

    Raises:
        Refused: transformers is missing, or cannot load the folder; too little text.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise Refused(f"{folder}: a model folder needs transformers; accepted here: a run of pretrain") from None
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **SAFE)
    except (OSError, ValueError, KeyError) as error:
        raise Refused(
            f"{folder}: transformers cannot load it ({error}); accepted: config.json and safetensors"
        ) from None
    model.eval()
    vocab = model.get_input_embeddings().num_embeddings
    if (folder / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, **SAFE)
        tokens = torch.tensor(tokenizer(text.decode("utf-8", "replace"))["input_ids"])
    else:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % vocab
    need = batches * batch * context
    if len(tokens) < need:
        raise Refused(f"--data: {len(tokens)} tokens; accepted: text of {need} tokens or more")
    windows = tokens[:need].view(batches, batch, context)
    return model, [{"input_ids": w, "labels": w} for w in windows]
