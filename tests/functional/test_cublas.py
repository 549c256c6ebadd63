"""cublas: what torch's scaled_mm and scaled_grouped_mm are handed, byte for byte, and what is refused before them.

No device here has them: stand-ins check what torch documents, take the scales out of the tensor cores' layout and
multiply in fp64. torch's own checks of shapes, strides and recipes run on fake CUDA tensors.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType

import fp4ext
from fp4ext import reference
from fp4ext.functional import cublas
from fp4ext.functional.gemms import check_choices

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


def fake(q):
    """The same on a CUDA device that is not there."""
    made = {name: torch.empty(t.shape, dtype=t.dtype, device="cuda") for name, t in q.tensors().items()}
    return fp4ext.QTensor(**{"global_scale": None, **made}, format=q.format, shape=q.shape)


@pytest.mark.parametrize("format", FORMATS)
def test_torch_accepts_it(monkeypatch, format):
    """Shapes, strides, dtypes and recipes pass torch's own checks, on tensors that lie on no device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    x, w = product(format, (130,), 48, 96)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = cublas.gemm(fake(x), fake(w), None, torch.bfloat16)
    assert y.shape == (130, 48) and y.dtype == torch.bfloat16 and y.device.type == "cuda"


# ---- experts ----


@pytest.fixture
def scaled_grouped_mm(monkeypatch):
    """The stand-in, and a device that has it. Gives the list of the offsets that it was called with.

    What it demands: x [T, K] row by row, w [E, K, N] column by column, K in bytes and N multiples of 16; each expert's
    scales of x in the tensor cores' layout, padded to 128 rows, one expert's after the other's, in a matrix of at least
    T rows; those of w [E, size]; NVFP4's global scales fp32, one per expert; bfloat16 out. It leaves unassigned rows as
    they were.
    """
    called = []

    def multiply(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, offs, output_dtype):
        (rows, bytes_), (experts, _, n) = a.shape, b.shape
        assert a.is_contiguous() and b.mT.is_contiguous() and b.shape[1] == bytes_
        assert bytes_ % 16 == 0 and n % 16 == 0 and output_dtype == torch.bfloat16
        assert offs.dtype == torch.int32 and offs.shape == (experts,)
        ends = offs.tolist()
        assert ends == sorted(ends) and 0 <= ends[0] and ends[-1] <= rows
        columns = (
            -(-bytes_ * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1) // (16 if len(scale_a) == 2 else 32) // 4) * 4
        )
        assert scale_a[0].dim() == 2 and scale_a[0].shape[0] >= rows and scale_a[0].shape[1] == columns
        assert scale_b[0].shape == (experts, -(-n // 128) * 128 * columns)
        for scales in (scale_a, scale_b):
            assert all(s.shape == (experts,) and s.is_contiguous() for s in scales[1:])
        y = torch.full((rows, n), torch.nan, dtype=output_dtype)
        start, slab, flat = 0, 0, scale_a[0].reshape(-1)
        for e, end in enumerate(ends):
            size = -(-(end - start) // 128) * 128 * columns
            of_x = [flat[slab : slab + size], *(s[e] for s in scale_a[1:])]
            of_w = [scale_b[0][e], *(s[e] for s in scale_b[1:])]
            if end > start:
                x = values(a[start:end], of_x, recipe_a, swizzle_a)
                y[start:end] = (x @ values(b[e].t(), of_w, recipe_b, swizzle_b).mT).to(output_dtype)
            start, slab = end, slab + size
        assert slab <= flat.numel() and not flat[slab:].view(torch.uint8).any()
        called.append(ends)
        return y

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", multiply)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    return called


def experts(format, offsets, rows=None, n=48, k=96, **spec):
    """x, each expert's rows of another size, w, and the offsets."""
    torch.manual_seed(len(offsets) + n + k)
    ends = torch.tensor(offsets, dtype=torch.int32)
    x, w = torch.randn(rows or offsets[-1] + 3, k), torch.randn(len(offsets), n, k)
    for e, (a, b) in enumerate(zip([0, *offsets], offsets, strict=False)):
        x[a:b] *= 100.0 ** (e % 3 - 1)
        w[e] *= 10.0 ** (e % 3)
    key = fp4ext.Spec.parse(format).with_(**spec)
    return fp4ext.grouped_quantize(x, key, ends), fp4ext.grouped_quantize(w, format), ends


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("offsets", [[5, 5, 140, 141], [0, 300], [128, 256, 257], [0, 0, 0], [64]], ids=str)
def test_each_expert_arrives(scaled_grouped_mm, format, offsets):
    """Experts with none, with fewer than 128 and with more rows; gains far apart; unassigned rows are zeros."""
    for n, k in ((48, 96), (144, 4160), (16, 32)):
        x, w, ends = experts(format, offsets, n=n, k=k)
        y = cublas.grouped_gemm(x, w, ends)
        start, by_row, of_w = 0, x.dequantize(torch.float32), w.dequantize(torch.float32)
        for e, end in enumerate(offsets):
            wanted = (by_row[start:end].double() @ of_w[e].double().mT).float()
            error = (y[start:end].float() - wanted).abs()
            assert (error <= 2.0**-8 * wanted.abs() + 2.0**-20 * wanted.abs().amax()).all() if end > start else True, e
            start = end
        assert y.dtype == torch.bfloat16 and not y[start:].any()
    assert scaled_grouped_mm == [offsets] * 3


def test_one_global_scale_a_row(scaled_grouped_mm):
    """outer='row': torch takes one per expert; the ratio of each row to it is multiplied afterwards."""
    offsets = [70, 70, 200]
    for outer, roundings in (("row", 2), ("tensor", 1)):
        x, w, ends = experts("nvfp4", offsets, outer=outer)
        y, start = cublas.grouped_gemm(x, w, ends), 0
        for e, end in enumerate(offsets):
            wanted = x.dequantize(torch.float32)[start:end].double() @ w.dequantize(torch.float32)[e].double().mT
            if roundings == 1:  # but for fl(g_x·g_w), which may turn a tie
                assert (y[start:end] == wanted.to(torch.bfloat16)).double().mean() > 0.999 if end > start else True
            assert ((y[start:end].double() - wanted).abs() <= roundings * 1.01 * 2.0**-8 * wanted.abs() + 1e-30).all()
            start = end
    one = fp4ext.quantize(torch.randn(200, 96), "nvfp4")
    y = cublas.grouped_gemm(one, w, ends)
    wanted = one.dequantize(torch.float32)[70:].double() @ w.dequantize(torch.float32)[2].double().mT
    assert ((y[70:].double() - wanted).abs() <= 1.01 * 2.0**-8 * wanted.abs() + 1e-30).all()


def test_offsets_that_lie_are_clamped(scaled_grouped_mm):
    """As our kernels clamp them: torch's would stop the device."""
    x, w, _ = experts("nvfp4", [5, 9, 20], rows=20)
    for lie, told in (([30, 10, 40], [20, 20, 20]), ([-5, 8, 7], [0, 8, 8])):
        cublas.grouped_gemm(x, w, torch.tensor(lie, dtype=torch.int32))
        assert scaled_grouped_mm[-1] == told


def test_no_rows(scaled_grouped_mm):
    x, w, ends = experts("mxfp8", [0, 0])
    nothing = fp4ext.grouped_quantize(torch.randn(0, 96), "mxfp8", ends)
    assert cublas.grouped_gemm(nothing, w, ends).shape == (0, 48) and not scaled_grouped_mm


def test_what_it_does_not_take_of_experts(scaled_grouped_mm):
    x, w, ends = experts("nvfp4", [5, 20])
    ragged = fp4ext.grouped_quantize(torch.randn(20, 48), "nvfp4", ends, axis=-2)
    refused = [
        ((*experts("mxfp4", [5, 20])[:2],), "x is mxfp4 and w mxfp4"),
        ((torch.ones(23, 96, dtype=torch.bfloat16), w), "x is torch.bfloat16 and w nvfp4"),
        ((x, experts("mxfp8", [5, 20])[1]), "x is nvfp4 and w mxfp8"),
        ((*experts("nvfp4", [5, 20], k=48)[:2],), "K is 48 in whole blocks and N 48"),
        ((*experts("mxfp8", [5, 20], n=24)[:2],), "K is 96 in whole blocks and N 24"),
        (
            (x, fp4ext.grouped_quantize(torch.randn(2, 48, 96), "nvfp4/amax/nearest/1x16/row")),
            r"w has global scales \(2, 48, 1\)",
        ),
        ((ragged, ragged), r"w has shape \(48, 20\)"),
        ((x, w, torch.float32), "out_dtype is torch.float32"),
        ((x, fp4ext.grouped_quantize(torch.randn(1025, 16, 96), "nvfp4")), "w has 1025 experts"),
    ]
    for (a, b, *dtype), why in refused:
        with pytest.raises(ValueError, match=f"{why}; backend 'cublas' takes experts over rows"):
            cublas.grouped_gemm(a, b, ends, *dtype)
    assert not scaled_grouped_mm


@pytest.mark.parametrize("sm", [(9, 0), (12, 0)])
def test_a_device_whose_experts_torch_does_not_multiply(scaled_grouped_mm, monkeypatch, sm):
    x, w, ends = experts("nvfp4", [5, 20])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: sm)
    why = (
        f"'cublas' is not available for experts: this device is sm_{sm[0]}0, and torch's scaled_grouped_mm needs sm_10x"
    )
    with pytest.raises(RuntimeError, match=why):
        cublas.grouped_gemm(x, w, ends)
    assert ("dense products alone" in cublas.status(0)) == (sm == (12, 0))
    monkeypatch.delattr(torch.nn.functional, "scaled_grouped_mm")
    with pytest.raises(RuntimeError, match="has no torch.nn.functional.scaled_grouped_mm"):
        cublas.grouped_gemm(x, w, ends)


def test_experts_are_refused_where_rows_are_promised():
    x, w, ends = experts("nvfp4", [5, 20])
    with pytest.raises(ValueError, match="unknown backend 'cublas' on cpu; accepted: auto, cpu"):
        fp4ext.grouped_gemm(x, w, ends, accumulate="fast", backend="cublas")


@pytest.mark.parametrize("format", FORMATS)
def test_torch_accepts_experts(monkeypatch, format):
    """Its checks on fake tensors. Before torch 2.14 only MXFP8 has any, those of the op that came before."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    x, w, ends = experts(format, [5, 20, 20, 130])
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_grouped_mm_v2", "Meta"):
        if format == "nvfp4":
            pytest.skip(f"torch {torch.__version__} checks NVFP4 of experts on a device alone")

        def before(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, offs, output_dtype):
            return torch._scaled_grouped_mm(a, b, scale_a[0], scale_b[0], offs, out_dtype=output_dtype)

        monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", before)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = cublas.grouped_gemm(fake(x), fake(w), torch.empty(ends.shape, dtype=ends.dtype, device="cuda"))
    assert y.shape == (133, 48) and y.dtype == torch.bfloat16 and y.device.type == "cuda"
