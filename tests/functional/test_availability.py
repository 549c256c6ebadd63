"""backends: every backend has a line, which says that it is there or why it is not."""

import pytest
import torch

import fp4ext
from fp4ext import _C


def test_every_backend_has_a_line():
    report = fp4ext.backends()
    assert list(report) == ["cpu", "emulated", "fast", "cublas", "native"]
    assert all(why.startswith(("available: ", "not built: ", "built, but ")) for why in report.values())


def test_the_cpu_is_always_available():
    """It names the instruction set in use, those it could use, and the threads."""
    before = _C.isa()
    try:
        for isa in _C.isas():
            _C.force_isa(isa)
            line = fp4ext.backends()["cpu"]
            assert line.startswith(f"available: {isa} in use, ") and ", ".join(_C.isas()) in line
            assert f"{torch.get_num_threads()} threads" in line
    finally:
        _C.force_isa(before)


def test_what_was_not_built_says_why():
    if not _C.cuda_kernel_sets:
        assert fp4ext.backends()["native"] == f"not built: {_C.build_note}" and len(_C.build_note) > 10


def test_gemm_takes_the_backends_that_are_there():
    """Where the tensors are, and refuses the others by pointing here."""
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    fp4ext.gemm(x, x, backend="cpu")
    for name in ("emulated", "fast", "cublas", "native"):
        with pytest.raises(ValueError, match="accepted: auto, cpu .fp4ext.backends.. says why"):
            fp4ext.gemm(x, x, backend=name)
    if fp4ext.backends()["emulated"].startswith("available"):
        fp4ext.gemm(x.cuda(), x.cuda(), backend="emulated")
