"""The transpose of 16×16 tiles is what the quantizer gives along the other axis, byte for byte."""

import pytest
import torch

import fp4ext
from fp4ext.functional.transpose import transposed
from fp4ext.policy import Spec
from fp4ext.testing import assert_bytes_equal, generate


@pytest.mark.parametrize("rule", ["amax", "four_over_six", "sweep"])
@pytest.mark.parametrize("shape", [(16, 16), (48, 256), (256, 32)])
@pytest.mark.parametrize("kind", ["gaussian", "outliers100", "zeros", "tiny"])
def test_it_is_the_column_wise_copy(kind, shape, rule):
    x, spec = generate(kind, *shape), Spec("nvfp4", rule, block="16x16")
    got = transposed(fp4ext.quantize(x, spec, role="w"))
    wanted = fp4ext.quantize(x, spec, axis=-2, role="w")
    for name, part in wanted.tensors().items():
        assert_bytes_equal(getattr(got, name).reshape(-1).view(torch.uint8), part.reshape(-1).view(torch.uint8), name)
    assert got.shape == wanted.shape


@pytest.mark.parametrize(
    ("x", "spec"),
    [
        (torch.ones(16, 24), Spec("nvfp4", block="16x16")),
        (torch.ones(8, 32), Spec("nvfp4", block="16x16")),
        (torch.ones(2, 16, 16), Spec("nvfp4")),
        (torch.ones(32, 32), Spec("mxfp8")),
        (torch.ones(16, 16), Spec("nvfp4", outer="row")),
    ],
)
def test_what_is_refused(x, spec):
    with pytest.raises(ValueError, match="accepted"):
        transposed(fp4ext.quantize(x, spec))
