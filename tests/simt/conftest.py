"""The library fp4ext_simt, built once a session."""

import os
import shutil

import pytest
import torch

from .build import build

DEVICES: dict[int, int] = {}  # by compute capability: what is known of a device is kept, its self-test for one


class Machine:
    """torch.ops.fp4ext_simt, and the knobs of the machine that runs its kernels."""

    MODES = ("late", "early", "random")
    ARITHMETICS = ("hardware", "nearest", "toward_zero")

    def __init__(self, library):
        torch.ops.load_library(str(library))
        self.ops = torch.ops.fp4ext_simt

    def configure(
        self, seed: int = 0, asynchronous: str = "late", arithmetic: str = "hardware", races: bool = True
    ) -> None:
        """seed: of the schedule. asynchronous: when copies land. arithmetic: of tensor cores (ARITHMETICS). races:
        whether one ends the launch, or shows by its result alone, as on a device."""
        self.ops.configure(seed, asynchronous, arithmetic, races)


@pytest.fixture(scope="session")
def _machine():
    if shutil.which("g++") is None:
        pytest.skip("the SIMT machine is built with g++, which is not here")
    return Machine(build(sanitize="FP4EXT_SIMT_SANITIZE" in os.environ))


@pytest.fixture
def simt(_machine):
    _machine.configure()
    return _machine


@pytest.fixture
def device(simt):
    """All tensors lie on a device of that compute capability, which is one device in all tests."""

    def of(sm):
        i = DEVICES.setdefault(sm, len(DEVICES))
        simt.ops.set_device(i, sm)
        return i

    return of
