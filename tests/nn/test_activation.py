"""An element of SwiGLU has the same bits wherever it lies."""

import pytest
import torch
from torch.nn import functional as F

import fp4ext
from fp4ext.nn.activation import silu, swiglu
from fp4ext.testing import assert_bytes_equal
from fp4ext.train.runs.directory import settings


@pytest.fixture
def three_threads():
    """Shares that end within a vector."""
    with settings(3):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_company(three_threads, dtype):
    x = torch.randn(211, 2 * 365, generator=torch.Generator().manual_seed(0)).to(dtype)
    with fp4ext.stage("rl_sampler"):
        whole = swiglu(x)
        for row in range(0, 211, 7):
            assert_bytes_equal(swiglu(x[row]), whole[row], f"row {row}")
        assert_bytes_equal(torch.stack([swiglu(row) for row in x.split(1)])[:, 0], whole)


def test_torchs_fp32_does_depend(three_threads):
    """Why this module is there. If this fails, torch has mended it, and the module may go."""
    x = torch.randn(211, 365, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(F.silu(x), torch.cat([F.silu(row) for row in x.split(1)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_hide_it(dtype):
    """Every input, in vectors and alone."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[~x.isnan()]
    assert_bytes_equal(torch.cat([F.silu(part) for part in x.split(3)]), F.silu(x))


@pytest.mark.parametrize("stage", fp4ext.policy.policy.STAGES)
def test_values_and_gradients(stage):
    """Within 2⁻²² of fp64, relative: four roundings and an exponential."""
    x = torch.cat([torch.randn(1000) * 5, torch.tensor([0.0, -0.0, 80.0, -80.0])]).requires_grad_()
    exact = x.detach().double().requires_grad_()
    F.silu(exact).sum().backward()
    with fp4ext.stage(stage):
        silu(x).sum().backward()
        torch.testing.assert_close(silu(x).double(), F.silu(exact), rtol=2**-22, atol=1e-12)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2**-20, atol=1e-6)
    assert silu(x[-4:-2]).view(torch.int32).tolist() == [0, -(2**31)]
