"""Mutants of the kernels are caught: a quarter of them, chosen by the commit, or all with FP4EXT_ALL_MUTANTS=1."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from .build import ROOT
from .mutants import MUTANTS, REDUNDANT, dropped

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mutants")]  # one worker builds and runs them
SHARE = 4
ALL = [name for name, *_ in [*MUTANTS, *dropped()]]


def chosen() -> list[str]:
    """Another quarter at each commit, so that all are tried in a few."""
    if "FP4EXT_ALL_MUTANTS" in os.environ:
        return ALL
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    number = lambda name: int(hashlib.sha256((done.stdout + name).encode()).hexdigest(), 16)  # noqa: E731
    return [name for name in ALL if number(name) % SHARE == 0]


CHOSEN = chosen()


@pytest.fixture(scope="module")
def verdicts():
    if shutil.which("g++") is None:
        pytest.skip("the SIMT machine is built with g++, which is not here")
    command = [sys.executable, "-m", "tests.simt.mutants", *CHOSEN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line["name"]: line["why"] for line in map(json.loads, done.stdout.splitlines())}


def test_there_are_enough():
    assert len(ALL) >= 150 and len(set(ALL)) == len(ALL) and set(REDUNDANT) <= set(ALL)


@pytest.mark.parametrize("name", CHOSEN)
def test_caught(verdicts, name):
    if name in REDUNDANT:
        assert verdicts[name] is None, f"{name}: it is caught, so it is not redundant"
        return
    assert verdicts[name], f"{name}: nothing failed"
    if name.startswith("self-test"):
        assert verdicts[name].startswith("self-test: ") and " instead of " in verdicts[name], verdicts[name]
