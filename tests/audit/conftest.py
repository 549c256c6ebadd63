"""A model small enough to train and audit in seconds, on real text."""

import argparse

import pytest
import torch

from fp4ext.train import Preset, Shape, data
from fp4ext.train.models.transformer import Transformer
from fp4ext.train.pretraining.arm import Arm
from fp4ext.train.runs.directory import settings

PRESET = Preset(
    "audited",
    Shape(layers=2, d=64, heads=2, ffn=128, context=64),
    steps=30,
    batch=8,
    lr=4e-3,
    min_lr=1e-3,
    warmup=4,
)


MIXTURE = PRESET.with_(
    name="mixed", shape=Shape(layers=2, d=64, heads=2, ffn=32, context=64, experts=4, top_k=2, expert_ffn=48)
)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tensors this small are not worth two."""
    with settings(1):
        yield


@pytest.fixture(scope="session")
def corpus():
    return data.load([argparse.__file__], PRESET.shape.context)


def train(preset, corpus):
    """The weights of a short run, as a state_dict."""
    torch.manual_seed(0)
    arm = Arm("bf16", preset, 0, torch.device("cpu"))
    for step in range(preset.steps):
        arm.step(*corpus.batch(0, step, preset.batch, preset.shape.context), step)
    return {name: t.clone() for name, t in arm.model.state_dict().items()}


def filled(preset, weights):
    model = Transformer(preset.shape)
    model.load_state_dict(weights)
    return model


@pytest.fixture(scope="session")
def trained(corpus):
    return train(PRESET, corpus)


@pytest.fixture(scope="session")
def trained_mixture(corpus):
    return train(MIXTURE, corpus)


@pytest.fixture
def model(trained):
    return filled(PRESET, trained)


@pytest.fixture
def mixture(trained_mixture):
    """A mixture of experts beside a shared one."""
    return filled(MIXTURE, trained_mixture)


@pytest.fixture
def batches(corpus):
    return [corpus.batch(1, i, 4, PRESET.shape.context) for i in range(2)]
