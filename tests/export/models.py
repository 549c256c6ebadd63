"""Tiny models of real classes, as plain BF16 checkpoints; and checkpoints with weights of one's own."""

import json
import logging
import os
import shutil
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

import fp4ext
from fp4ext.export import load

VOCAB = 80


def transformers():
    """The package, quiet, with no progress bars."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every file is here; it must not look for others
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    return transformers


def plain(kind: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint of a tiny model with random weights, as its class saves it."""
    torch.manual_seed(seed)
    model = MODELS[kind]().bfloat16()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.05) if p.dim() >= 2 else p.normal_(1, 0.05)
    model.save_pretrained(folder)
    return folder


def llama():
    t = transformers()
    return t.LlamaForCausalLM(
        t.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
        )
    )


def gpt_oss():
    t = transformers()
    config = t.GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        dtype="bfloat16",
        pad_token_id=0,
        eos_token_id=1,
    )
    return t.GptOssForCausalLM(config)


_INKLING2 = dict(
    vocab_size=VOCAB + 16,
    unpadded_vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=16,
    sliding_window_size=8,
    d_rel=4,
    rel_extent=16,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_layers_per_attn_res_block=2,
    eos_token_id=1,
    dtype="bfloat16",
)


def inkling2_loop():
    transformers()
    from transformers.models.inkling2_loop.configuration_inkling2_loop import Inkling2LoopTextConfig
    from transformers.models.inkling2_loop.modeling_inkling2_loop import Inkling2LoopForCausalLM

    loop = dict(loop_layer_index_start=2, loop_layer_index_end=4, loop_num_passes=2, loop_gate_rank=8)
    return Inkling2LoopForCausalLM(Inkling2LoopTextConfig(**_INKLING2, **loop))


def inkling2():
    transformers()
    from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig
    from transformers.models.inkling2.modeling_inkling2 import Inkling2ForCausalLM

    return Inkling2ForCausalLM(Inkling2TextConfig(**_INKLING2))


MODELS = {"llama": llama, "gpt_oss": gpt_oss, "inkling2": inkling2, "inkling2_loop": inkling2_loop}


def opened(folder: Path, **how):
    """The model that transformers makes of a checkpoint."""
    return transformers().AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def logits(model) -> torch.Tensor:
    tokens = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens).logits


def dense(checkpoint, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """Every weight as fp4ext decodes it, as the plain parameter would be."""
    out = {}
    for name, weight in checkpoint.items():
        if isinstance(weight, fp4ext.QTensor):
            weight = weight.dequantize(dtype)
            weight = weight.mT if checkpoint.layout.transposed else weight
        out[name] = weight.contiguous()
    return out


def plain_twin(folder: Path, like: Path, twin: Path, dtype=torch.bfloat16) -> Path:
    """A plain checkpoint of the weights that fp4ext decodes from `folder`; the rest as in the plain one `like`."""
    shutil.copytree(like, twin)
    save_file(dense(load(folder), dtype), twin / "model.safetensors", {"format": "pt"})
    return twin


def folder_of(folder: Path, tensors: dict[str, torch.Tensor], config: dict | None = None, **files) -> Path:
    """A checkpoint of these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    for name, value in (files if config is None else files | {"config": config}).items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder
