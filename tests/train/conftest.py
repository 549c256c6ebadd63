"""A run small enough for tests: two layers, a text of one source file, seconds on one core."""

import argparse
import os
import signal
from pathlib import Path

import pytest

from fp4ext.train import Config, Preset, Shape
from fp4ext.train.runs.directory import settings
from fp4ext.train.runs.display import Silent

MICRO = Preset(
    "micro",
    Shape(layers=2, d=32, heads=2, ffn=64, context=32),
    steps=10,
    batch=4,
    lr=1e-2,
    min_lr=1e-3,
    warmup=2,
    log_every=1,
    eval_every=4,
    save_every=4,
    eval_windows=8,
    final_windows=16,
)


@pytest.fixture
def one_thread():
    """For work so small that it is slower on two."""
    with settings(1):
        yield


@pytest.fixture(scope="session")
def text() -> Path:
    """A file of real text, 90 kB or more, that every interpreter has."""
    return Path(argparse.__file__)


@pytest.fixture
def micro(text):
    """micro(policies=…, steps=…, seed=…) makes a Config."""

    def make(policies=("bf16",), seed=0, **changes) -> Config:
        return Config(MICRO.with_(**changes), policies=policies, data=[text], seed=seed, threads=1)

    return make


class InterruptAt(Silent):
    """A display that presses Ctrl-C during a step."""

    def __init__(self, step: int, number: int = signal.SIGINT):
        self.at, self.number, self.notes = step, number, []

    def step(self, done, lines):
        if done == self.at:
            os.kill(os.getpid(), self.number)

    def note(self, text):
        self.notes.append(text)
