"""The arithmetic of tensor cores on the SIMT machine: MMA-Sim's model (arXiv 2511.10909), once more in fractions."""

import math
from fractions import Fraction

import pytest
import torch

from .operands import Operand, exact
from .test_gemm import check_bound, gemm

K = {"bf16": 16, "mxfp8": 32, "nvfp4": 64}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
DEVICE = 40  # of the machine, for an sm of our own


def exponent(x: float, least: int) -> int:
    return max(math.frexp(x)[1] - 1, least)


def toward_zero(x: Fraction, unit: Fraction) -> Fraction:
    return int(x / unit) * unit  # int() drops the fraction


def cut(terms: list[tuple[Fraction, int]], c: float, bits: int) -> float:
    """terms: values with their exponents. All are cut, added, and rounded toward zero to 24 bits."""
    if c:
        terms = [*terms, (Fraction(c), exponent(c, -126))]
    if not terms:
        return 0.0
    unit = Fraction(2) ** (max(e for _, e in terms) - bits)
    total = sum(toward_zero(value, unit) for value, _ in terms)
    if total == 0:
        return 0.0
    size = exponent(float(total), -126) if abs(float(total)) >= 2.0**-126 else -126
    if Fraction(2) ** size > abs(total):  # float() rounded up to a power of two
        size -= 1
    return float(toward_zero(total, Fraction(2) ** (size - 23)))


def e4m3(code: int) -> tuple[float, int]:
    value = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float().item()
    return value, exponent(value, -6)


def model(kind: str, a, b, a_scales, b_scales, c: float, sm: int) -> float:
    if kind == "bf16":
        a, b = a.tolist(), b.tolist()
        products = [
            (Fraction(x) * Fraction(y), exponent(x, -126) + exponent(y, -126)) for x, y in zip(a, b, strict=True)
        ]
        if sm >= 90:
            return cut([p for p in products if p[0]], c, 25)
        return cut([p for p in products[8:] if p[0]], cut([p for p in products[:8] if p[0]], c, 24), 24)
    if kind == "mxfp8":
        scale = int(a_scales) + int(b_scales) - 254
        products = []
        for x, y in zip(a.tolist(), b.tolist(), strict=True):
            (u, e), (v, f) = e4m3(x), e4m3(y)
            products.append((Fraction(u) * Fraction(v) * Fraction(2) ** scale, e + f + scale))
        return cut([p for p in products if p[0]], c, 25)
    groups = []
    for g in range(4):
        (s, e), (t, f) = e4m3(int(a_scales[g])), e4m3(int(b_scales[g]))
        elements = [
            [
                E2M1[code & 7] * (-1 if code & 8 else 1)
                for byte in x[8 * g : 8 * g + 8].tolist()
                for code in (byte & 15, byte >> 4)
            ]
            for x in (a, b)
        ]
        total = sum(Fraction(u) * Fraction(v) for u, v in zip(*elements, strict=True))
        if s and t:
            groups.append((total * Fraction(s) * Fraction(t), e + f))
    return cut(groups, c, 35)


def operands(kind: str, g: torch.Generator):
    if kind == "bf16":
        x = [torch.randn(16, generator=g) * 2.0 ** torch.randint(-20, 8, (16,), generator=g) for _ in range(2)]
        x[0][torch.randint(0, 16, (1,), generator=g)] = 0
        return *(v.bfloat16() for v in x), torch.empty(0), torch.empty(0)
    codes = [torch.randint(0, 256, (32,), generator=g).to(torch.uint8) for _ in range(2)]
    if kind == "mxfp8":
        for c in codes:
            c[(c & 0x7F) == 0x7F] = 0
        return *codes, *(torch.randint(110, 140, (1,), generator=g).to(torch.uint8) for _ in range(2))
    return *codes, *(torch.randint(0, 0x7F, (4,), generator=g).to(torch.uint8) for _ in range(2))


@pytest.mark.parametrize("kind", K)
@pytest.mark.parametrize("sm", [80, 100])
def test_equals_the_model(simt, kind, sm):
    simt.ops.set_device(DEVICE, sm)
    g = torch.Generator().manual_seed(sm)
    for i in range(150):
        parts = operands(kind, g)
        c = (torch.randn(1, generator=g) * 2.0 ** torch.randint(-30, 30, (1,), generator=g)).item() if i % 4 else 0.0
        assert simt.ops.dot(kind, *parts, c) == model(kind, *parts, c, sm), (kind, i)


def test_the_smallest_and_the_largest(simt):
    """Sums below 2^-126 lose bits of a subnormal; above fp32 they are infinite; NaN and infinity come through."""
    simt.ops.set_device(DEVICE, 80)
    none = torch.empty(0)
    x, y = torch.zeros(16).bfloat16(), torch.ones(16).bfloat16()
    for value, c in ((2.0**-130, 3 * 2.0**-149), (2.0**127, 2.0**127), (math.inf, 1.0), (-math.inf, 1.0), (0.0, 0.0)):
        x[3] = value
        assert simt.ops.dot("bf16", x, y, none, none, c) == torch.tensor(value + c).float().item()
    x[3], x[4] = math.inf, -math.inf
    assert math.isnan(simt.ops.dot("bf16", x, y, none, none, 0.0))
    codes = torch.full((32,), 0x38).to(torch.uint8)
    byte = torch.tensor([127]).to(torch.uint8)
    assert simt.ops.dot("mxfp8", codes, codes, byte, byte, 0.5) == 32.5
    assert math.isnan(simt.ops.dot("mxfp8", codes, codes, byte, byte + 128, 0.0))


@pytest.mark.parametrize("kernel", ["sm100", "sm120"])
def test_what_a_large_first_block_costs(simt, kernel):
    """What follows 448² is cut in each instruction: hardware breaks the bound of exact sums, and keeps its own."""
    k = 256
    codes = torch.full((1, k), 0x3F).to(torch.uint8)  # 1.875
    codes[:, :32] = 0
    codes[:, 0] = 0x7E  # 448
    scales = torch.full((1, k // 32), 127).to(torch.uint8)
    small = scales.clone()
    small[:, 1:] = 127 - 9
    x, w = Operand("mxfp8", codes, scales), Operand("mxfp8", codes, small)
    y = gemm(simt, kernel, x, w)
    check_bound(y, x, w, native="mxfp8")
    wanted, size = exact(x, w)
    assert (wanted - y.double()).item() > (k / 16 + 2) * 2.0**-24 * size.item()
    simt.configure(arithmetic="nearest")
    check_bound(gemm(simt, kernel, x, w), x, w, "nearest")
