"""All of transformers' causal language models: no head and no router is quantized, whatever they are called."""

import os
import signal
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fp4ext import policies
from fp4ext.conversion.decision import decide
from fp4ext.conversion.names import named_modules

os.environ.setdefault("HF_HUB_OFFLINE", "1")

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "router_num_experts")


# Parts with a size that a config does not name and that is, by chance, its number of experts.
BY_CHANCE = (".indexer.", ".audio_tower.")


def kinds():
    from transformers.models.auto import modeling_auto as auto

    mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
                auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
                auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)  # fmt: skip
    return sorted({name for mapping in mappings for name in mapping.values() if isinstance(name, str)})


def configs(config):
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type"):
            yield from configs(value)


def built(name):
    """The model on the meta device, of two layers where its config lets itself be cut; None where it needs more."""
    import transformers

    try:
        kind = getattr(transformers, name)
        config = kind.config_class()
        for part in configs(config):
            if isinstance(getattr(part, "num_hidden_layers", None), int) and not getattr(part, "layer_types", None):
                part.num_hidden_layers = min(part.num_hidden_layers, 4)
        with torch.device("meta"), within(seconds=8):
            return kind(config)
    except Exception:  # needs a package, a checkpoint or sizes of its own
        return None


def suspicious(model, decision):
    """Chosen layers whose outputs are as many as tokens of the vocabulary, or experts: by shape, not by name. Numbers
    that a config has for something else too say nothing."""
    odd, other = set(), set()
    for part in configs(model.config):
        for key, value in vars(part).items():
            if isinstance(value, int) and value > 4:
                (odd if key in (*EXPERTS, "vocab_size") else other).add(value)
    for name, module in named_modules(model):
        if any(part in name for part in BY_CHANCE):
            continue
        if name in decision.chosen and isinstance(module, nn.Linear) and module.out_features in odd - other:
            yield name, module.out_features


@contextmanager
def within(seconds):
    """A TimeoutError where what is done inside takes longer: some default configs are of hundreds of layers."""

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_walk(part):
    pytest.importorskip("transformers")
    wrong, seen = {}, 0
    for name in kinds()[part::8]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = built(name)
        if model is None:
            continue
        seen += 1
        decision = decide(model, policies.get("end_to_end"))
        if found := dict(suspicious(model, decision)):
            wrong[name] = dict(list(found.items())[:4])
    assert seen > 20 and not wrong
