"""docs/numerics.md, 9."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from fp4ext import formats
from fp4ext.reference import dequantize, gemm, quantize
from fp4ext.reference.fp32 import fma
from fp4ext.reference.quantization import elements_of, scales_of

from .data import gaussian, outliers, uneven, wide

PAIRS = {
    "nvfp4": ("nvfp4/sweep", "nvfp4/amax/nearest/16x16"),
    "mxfp4": ("mxfp4", "mxfp4/floor"),
    "nvfp4 x mxfp4": ("nvfp4", "mxfp4"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "e5m2 x e4m3": ("mxfp8_e5m2", "mxfp8"),
    "nvfp4 x bf16": ("nvfp4", torch.bfloat16),
    "mxfp4 x mxfp8": ("mxfp4", "mxfp8"),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
    "fp32 x fp16": (torch.float32, torch.float16),
}


def operand(x, how):
    """What gemm takes, and the fp64 values it stands for."""
    if isinstance(how, torch.dtype):
        return x.to(how), x.to(how).double()
    codes, scales, g = quantize(x, how)
    fmt = how.split("/")[0]
    plain = dequantize(codes, scales, None, fmt, codes.shape[-1] * formats.get(fmt).codes_per_byte, torch.float64)
    values = plain * (g.double() if g.numel() else 1.0)
    return (codes, scales, g, fmt), values[:, : x.shape[1]]


def nearest_fp32(exact: Fraction) -> np.float32:
    """Round to nearest even, by comparison among neighbours."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1))


def test_fma_against_exact_fractions():
    """Random, cancelling, and subnormal sums."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3000, generator=g)
    c = torch.randn(3000, generator=g) * torch.exp2(torch.randint(-40, 41, (3000,), generator=g).float())
    c[:500] = -(a[:500] * b[:500])
    a[500:600] *= 2.0**-140
    c[500:600] *= 2.0**-140
    got = fma(a, b, c)
    want = [
        nearest_fp32(Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r)))
        for p, q, r in zip(a, b, c, strict=True)
    ]
    assert got.tolist() == [float(w) for w in want]


def test_fma_rounds_once_where_fp64_would_round_twice():
    """a·b is short of half an ulp of c by less than fp64 sees: a plain fp64 sum falls on the tie, and goes up to
    even."""
    c, differs = torch.tensor([1 + 2.0**-23]), 0
    for i in range(1, 200):
        a, b = (
            torch.tensor([1 + i * 2.0**-20]),
            torch.tensor([(1 - i * 2.0**-20) * 2.0**-24]),
        )  # a·b = 2^-24·(1 - i²·2^-40)
        want = float(nearest_fp32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))))
        assert float(fma(a, b, c)) == want and float(fma(-a, b, -c)) == -want
        differs += float((a.double() * b.double() + c.double()).float()) != want
    assert differs, "no input here tells one rounding from two"


def scalar_gemm(x, w):
    """The order of section 9 for one pair of rows, in exact fractions rounded at each step."""

    def split(op):
        if isinstance(op, torch.Tensor):
            return op.float(), torch.ones(op.shape[0], -(-op.shape[1] // 16)), False
        fmt = formats.get(op[3])
        return (
            elements_of(op[0], fmt),
            scales_of(op[1], fmt).repeat_interleave(fmt.block // 16, -1),
            fmt.element.bits == 4,
        )

    (ex, sx, fx), (ew, sw, fw) = split(x), split(w)
    k = max(ex.shape[1], ew.shape[1])
    k += -k % 16
    F = lambda t, i: Fraction(float(t[0, i])) if i < t.shape[1] else Fraction(0)  # noqa: E731
    chunks = []
    for start in range(0, k, 1024):
        stop = min(start + 1024, k)
        if fx and fw:
            acc = np.float32(0)
            for b in range(start // 16, stop // 16):
                total = sum((F(ex, i) * F(ew, i) for i in range(16 * b, 16 * b + 16)), Fraction(0))
                acc = nearest_fp32(total * F(sx, b) * F(sw, b) + Fraction(float(acc)))
        else:
            lanes = [np.float32(0)] * 16
            for i in range(start, stop):
                product = F(ex, i) * F(sx, i // 16) * F(ew, i) * F(sw, i // 16)
                lanes[i % 16] = nearest_fp32(product + Fraction(float(lanes[i % 16])))
            for h in (8, 4, 2, 1):
                lanes = [np.float32(lanes[i] + lanes[i + h]) for i in range(h)]
            acc = lanes[0]
        chunks.append(acc)
    total = chunks[0]
    for c in chunks[1:]:
        total = np.float32(total + c)
    return total


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("k", [16, 40, 80, 1072])
def test_the_order_of_summation(pair, k):
    for make in (gaussian, wide, uneven):
        x, w = make(1, k, seed=1), make(1, k, seed=2)
        (xo, _), (wo, _) = operand(x, PAIRS[pair][0]), operand(w, PAIRS[pair][1])
        gx, gw = (o[2] if isinstance(o, tuple) and o[2].numel() else torch.tensor(1.0) for o in (xo, wo))
        acc = scalar_gemm(xo, wo)
        want = np.float32(np.float64(acc) * (np.float64(gx.item()) * np.float64(gw.item())))
        assert gemm(xo, wo, out_dtype=torch.float32).item() == want


@pytest.mark.parametrize("pair", ["nvfp4", "nvfp4 x mxfp4", "mxfp8"])
def test_block_order_is_for_e2m1_pairs_alone(pair):
    """The same operands written out in fp32 take the lane order: other bits for a pair of E2M1, not for MXFP8."""
    x, w = uneven(24, 1040, seed=1), uneven(24, 1040, seed=2)
    (xo, _), (wo, _) = operand(x, PAIRS[pair][0]), operand(w, PAIRS[pair][1])
    plain = [dequantize(o[0], o[1], None, o[3], 1040) for o in (xo, wo)]
    bare = [(o[0], o[1], torch.empty(0), o[3]) for o in (xo, wo)]
    y, lanes = gemm(*bare, out_dtype=torch.float32), gemm(*plain, out_dtype=torch.float32)
    if pair == "mxfp8":
        assert torch.equal(y, lanes)
        return
    assert not torch.equal(y, lanes)
    for m in range(4):
        alone = scalar_gemm(*((o[0][m : m + 1], o[1][m : m + 1], None, o[3]) for o in (xo, wo)))
        assert y[m, m].item() == alone


@pytest.mark.parametrize("pair", PAIRS)
def test_bounds(pair):
    for make in (gaussian, wide, uneven, outliers):
        for k in (48, 1000, 4096):
            x, w = make(6, k, seed=1), make(5, k, seed=2)
            w[0] = x[0].flip(0)
            w[0, : k // 2] = -x[0, : k // 2]  # cancels
            (xo, xv), (wo, wv) = operand(x, PAIRS[pair][0]), operand(w, PAIRS[pair][1])
            y = gemm(xo, wo, out_dtype=torch.float32).double()
            exact, size = xv @ wv.T, xv.abs() @ wv.abs().T
            error = (y - exact).abs()
            assert (error <= (-(-k // 16) + 2) * 2.0**-24 * size + 1e-13 * size).all()
            if make is gaussian:
                assert (error[:, 1:] <= 2.0**-20 * size[:, 1:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["nvfp4", "bf16"])
def test_random_bound_at_65536(pair):
    x, w = gaussian(2, 65536, seed=1), gaussian(2, 65536, seed=2)
    (xo, xv), (wo, wv) = operand(x, PAIRS[pair][0]), operand(w, PAIRS[pair][1])
    error = (gemm(xo, wo, out_dtype=torch.float32).double() - xv @ wv.T).abs()
    assert (error <= 2.0**-20 * (xv.abs() @ wv.abs().T)).all()


@pytest.mark.parametrize("pair", PAIRS)
def test_exact_where_partial_sums_are(pair):
    """Small integers on an amax of 6: every format holds them, and fp32 every partial sum."""
    g = torch.Generator().manual_seed(0)
    values = torch.tensor([-6.0, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6])
    x, w = (values[torch.randint(11, (4, 1200), generator=g)] for _ in range(2))
    x[:, ::16], w[:, ::16] = 6, -6
    (xo, xv), (wo, wv) = operand(x, PAIRS[pair][0]), operand(w, PAIRS[pair][1])
    exact = xv @ wv.T
    y = gemm(xo, wo, out_dtype=torch.float32)
    assert torch.equal(y, exact.float())
    assert torch.equal(gemm(xo, wo), exact.float().bfloat16())


@pytest.mark.parametrize("pair", PAIRS)
def test_row_invariance(pair):
    x, w = gaussian(7, 200, seed=1), gaussian(9, 200, seed=2)
    how_x = (
        PAIRS[pair][0]
        if isinstance(PAIRS[pair][0], torch.dtype) or "mx" in PAIRS[pair][0]
        else "nvfp4/sweep/nearest/1x16/row"
    )
    wo, _ = operand(w, PAIRS[pair][1])
    every = gemm(operand(x, how_x)[0], wo, out_dtype=torch.float32)
    for rows in ([3], [6, 3, 3], [0, 1, 2, 3]):
        some = gemm(operand(x[rows], how_x)[0], wo, out_dtype=torch.float32)
        assert torch.equal(some, every[rows])


def test_global_scales_of_rows():
    x, w = gaussian(3, 64) * torch.tensor([[1.0], [1e3], [1e-3]]), gaussian(4, 64, seed=1)
    xo = (*quantize(x, "nvfp4/amax/nearest/1x16/row"), "nvfp4")
    wo = (*quantize(w, "nvfp4/amax/nearest/1x16/row"), "nvfp4")
    y = gemm(xo, wo, out_dtype=torch.float32)
    for m in range(3):
        for n in range(4):
            alone = gemm(
                (*(t[m : m + 1] for t in xo[:3]), "nvfp4"),
                (*(t[n : n + 1] for t in wo[:3]), "nvfp4"),
                out_dtype=torch.float32,
            )
            assert y[m, n] == alone.item()


@pytest.mark.parametrize("sizes", [(3e38, 1e-36), (1e38, 1e-38), (1e-30, 1e-30), (1e-38, 1.0)])
def test_global_scales_neither_overflow_nor_vanish(sizes):
    """The product of two outer scales overflows or underflows, and y does not."""
    x, w = gaussian(2, 32).clamp(-1, 1) * sizes[0], gaussian(2, 32, seed=1).clamp(-1, 1) * sizes[1]
    (xo, xv), (wo, wv) = operand(x, "nvfp4"), operand(w, "nvfp4")
    y = gemm(xo, wo, out_dtype=torch.float32)
    assert torch.allclose(y.double(), xv @ wv.T, rtol=1e-5, atol=2e-45)


def test_bias_and_output_dtypes():
    x, w, bias = gaussian(3, 64), gaussian(4, 64, seed=1), gaussian(4, seed=2).bfloat16()
    y = gemm(x, w, out_dtype=torch.float32)
    assert torch.equal(gemm(x, w, bias, torch.float32), y + bias.float())
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(gemm(x, w, bias, dtype), (y + bias.float()).to(dtype))
    assert gemm(x, w).dtype == torch.bfloat16


def test_nan_reaches_its_rows_only():
    x, w = gaussian(4, 64), gaussian(5, 64, seed=1)
    x[2, 3] = torch.nan
    for how in ("nvfp4", "mxfp8", "mxfp4"):
        y = gemm(operand(x, how)[0], operand(w, how)[0])
        assert torch.equal(y.isnan(), torch.tensor([False, False, True, False])[:, None].expand(4, 5))


def test_empty():
    for m, n, k in ((0, 4, 32), (4, 0, 32), (4, 3, 0)):
        for how in ("nvfp4", "mxfp8", torch.bfloat16):
            y = gemm(operand(torch.zeros(m, k), how)[0], operand(torch.zeros(n, k), how)[0])
            assert y.shape == (m, n) and (y == 0).all()
