"""Every mutant of the kernels (mutants.py) is caught."""

import json
import shutil
import subprocess
import sys

import pytest

from .build import ROOT
from .mutants import MUTANTS, REDUNDANT, dropped

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def verdicts():
    if shutil.which("g++") is None:
        pytest.skip("the SIMT machine is built with g++, which is not here")
    command = [sys.executable, "-m", "tests.simt.mutants"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line["name"]: line["why"] for line in map(json.loads, done.stdout.splitlines())}


def test_there_are_enough():
    assert len(MUTANTS) >= 20 and len({name for name, *_ in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("name", [name for name, *_ in [*MUTANTS, *dropped()]])
def test_caught(verdicts, name):
    if name in REDUNDANT:
        assert verdicts[name] is None, f"{name}: it is caught, so it is not redundant"
        return
    assert verdicts[name], f"{name}: nothing failed"
    if name.startswith("self-test"):
        assert verdicts[name].startswith("self-test: ") and " instead of " in verdicts[name], verdicts[name]
