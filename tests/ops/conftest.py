"""What every op is tested under: each instruction set of this machine, any number of threads."""

import pytest
import torch

import fp4ext


@pytest.fixture
def each_isa():
    """each_isa(f) yields (isa, f()) for every instruction set, and leaves the one that was in use."""
    before = fp4ext._C.isa()

    def run(f):
        for isa in fp4ext._C.isas():
            fp4ext._C.force_isa(isa)
            yield isa, f()

    yield run
    fp4ext._C.force_isa(before)


@pytest.fixture(params=fp4ext._C.isas())
def isa(request):
    """The test runs under one instruction set after the other."""
    before = fp4ext._C.isa()
    fp4ext._C.force_isa(request.param)
    yield request.param
    fp4ext._C.force_isa(before)


@pytest.fixture(autouse=True)
def threads():
    """A test may set torch's threads; the next one does not see it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
