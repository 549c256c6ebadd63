"""cublas: what torch's scaled_mm is handed, byte for byte, and what is refused before it.

No device here has it: a stand-in checks what torch documents, takes the scales out of the tensor cores' layout and
multiplies in fp64. torch's own checks of shapes, strides and recipes run on fake CUDA tensors.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType

import fp4ext
from fp4ext import cublas, reference
from fp4ext.gemm import check_choices

FORMATS = {"nvfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn}


def values(codes, scales, recipe, swizzle):
    """fp64 [rows, K] of an operand as scaled_mm gets it."""
    nvfp4 = codes.dtype == torch.float4_e2m1fn_x2
    block = 16 if nvfp4 else 32
    rows, k = codes.shape[0], codes.shape[1] * (2 if nvfp4 else 1)
    first, *more = [ScalingType.BlockWise1x16, ScalingType.TensorWise] if nvfp4 else [ScalingType.BlockWise1x32]
    assert recipe == [first, *more]
    assert swizzle == [SwizzleType.SWIZZLE_32_4_4] + [SwizzleType.NO_SWIZZLE] * len(more)
    assert len(scales) == len(recipe) and all(s.numel() == 1 and s.dtype == torch.float32 for s in scales[1:])
    assert scales[0].dtype == (torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu) and scales[0].is_contiguous()
    assert scales[0].numel() == -(-rows // 128) * 128 * (-(-k // block // 4) * 4)
    linear = reference.unswizzle(scales[0].reshape(-1).view(torch.uint8), rows, k // block).view(scales[0].dtype)
    elements = reference.decode_e2m1(reference.unpack_nibbles(codes.view(torch.uint8))) if nvfp4 else codes.float()
    x = elements.double() * linear.float().double().repeat_interleave(block, dim=1)
    return x * scales[1].double() if more else x


@pytest.fixture
def scaled_mm(monkeypatch):
    """The stand-in, and a device that has it. Gives the list of the output dtypes asked for."""
    asked = []

    def multiply(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a=None, swizzle_b=None, output_dtype=None):
        assert a.is_contiguous() and b.t().is_contiguous() and b.shape[1] % 16 == 0
        asked.append(output_dtype)
        y = values(a, scale_a, recipe_a, swizzle_a) @ values(b.t(), scale_b, recipe_b, swizzle_b).mT
        return y.to(output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", multiply)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    return asked


def product(format, m=(5,), n=48, k=96, **spec):
    torch.manual_seed(len(m) + n + k)
    x, w = torch.randn(*m, k), torch.randn(n, k)
    return fp4ext.quantize(x, format, **spec), fp4ext.quantize(w, format)


def exact(x, w):
    return x.dequantize(torch.float32).double() @ w.dequantize(torch.float32).double().mT


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m", [(5,), (2, 130), (1,), ()], ids=str)
def test_operands_arrive(scaled_mm, format, m):
    """Codes, scales and outer scale: the product of what scaled_mm was handed is that of x̂ and ŵ."""
    for n, k in ((48, 96), (144, 4160), (16, 32)):
        x, w = product(format, m, n, k)
        y = cublas.gemm(x, w, None, torch.float32)
        assert y.shape == (*m, n)
        wanted = exact(x, w)
        assert (y - wanted).abs().max() <= 2.0**-22 * wanted.abs().max()
    assert scaled_mm == [torch.float32] * 3


def test_one_rounding_at_the_end(scaled_mm):
    """A bias, or a tensor that is added to, meets fp32 sums."""
    x, w = product("nvfp4")
    bias, out = torch.randn(48), torch.randn(5, 48)
    wanted = exact(x, w) + bias.double()
    assert torch.equal(cublas.gemm(x, w, bias, torch.bfloat16), wanted.float().to(torch.bfloat16))
    before = out.clone()
    assert cublas.gemm(x, w, bias, torch.bfloat16, out) is out
    assert (out - before - wanted).abs().max() < 1e-5
    cublas.gemm(x, w, None, torch.bfloat16)
    assert scaled_mm == [torch.float32, torch.float32, torch.bfloat16]
    for wrong in (out.bfloat16(), out[:4], out.mT.contiguous().mT):
        with pytest.raises(ValueError, match=r"accepted: a contiguous float32 \(5, 48\)"):
            cublas.gemm(x, w, None, torch.bfloat16, wrong)


def test_what_it_does_not_take(scaled_mm):
    refused = [
        (product("mxfp4"), "x is mxfp4 and w mxfp4"),
        ((torch.ones(4, 32, dtype=torch.bfloat16), product("nvfp4")[1]), "x is torch.bfloat16 and w nvfp4"),
        ((product("nvfp4")[0], product("mxfp8")[1]), "x is nvfp4 and w mxfp8"),
        (product("nvfp4", k=48), "K is 48 in whole blocks and N 48"),
        (product("mxfp8", n=24), "K is 96 in whole blocks and N 24"),
        (product("nvfp4", outer="row"), r"x has global scales \(5, 1\)"),
    ]
    for (x, w), why in refused:
        with pytest.raises(ValueError, match=f"{why}; backend 'cublas' takes NVFP4·NVFP4 with K a multiple of 32"):
            cublas.gemm(x, w, None, torch.bfloat16)
    assert not scaled_mm


def test_a_device_that_cannot(scaled_mm, monkeypatch):
    x, w = product("nvfp4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(
        RuntimeError, match="'cublas' is not available: built, but this device is sm_90, and it needs sm_100"
    ):
        cublas.gemm(x, w, None, torch.bfloat16)
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    with pytest.raises(RuntimeError, match="has no torch.nn.functional.scaled_mm"):
        cublas.gemm(x, w, None, torch.bfloat16)
    assert not scaled_mm


def test_it_is_never_where_rows_are_promised():
    """Nor the other backend whose order depends on the shape. The choice is refused before the device is asked."""
    for backend in ("fast", "cublas"):
        with pytest.raises(ValueError, match=f"{backend}' is not row-invariant; accepted with it: accumulate='fast'"):
            check_choices(torch.bfloat16, "invariant", backend, torch.device("cuda"))
        check_choices(torch.bfloat16, "fast", backend, torch.device("cuda"))
    x, w = product("nvfp4")
    with pytest.raises(ValueError, match="unknown backend 'cublas' on cpu; accepted: auto, cpu"):
        fp4ext.gemm(x, w, accumulate="fast", backend="cublas")


@pytest.mark.parametrize("format", FORMATS)
def test_torch_accepts_it(monkeypatch, format):
    """Shapes, strides, dtypes and recipes pass torch's own checks, on tensors that lie on no device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    x, w = product(format, (130,), 48, 96)
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_cuda = [
            fp4ext.QTensor(
                **{name: torch.empty(t.shape, dtype=t.dtype, device="cuda") for name, t in q.tensors().items()},
                **({} if q.global_scale is not None else {"global_scale": None}),
                format=q.format,
                shape=q.shape,
            )
            for q in (x, w)
        ]
        y = cublas.gemm(*on_cuda, None, torch.bfloat16)
    assert y.shape == (130, 48) and y.dtype == torch.bfloat16 and y.device.type == "cuda"
