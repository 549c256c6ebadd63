"""gemm, the op: equal to the reference byte for byte, for every pair of formats, on every path, in any company."""

import itertools

import pytest
import torch

import fp4ext
from fp4ext import reference
from fp4ext.functional import ops
from fp4ext.testing import assert_bytes_equal

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2", *PLAIN)
PAIRS = list(itertools.product(FORMATS, FORMATS))
RAGGED = [(1, 1, 1), (1, 3, 3), (3, 25, 15), (17, 50, 17), (5, 49, 48), (4, 24, 512), (1, 97, 528), (9, 8, 1024)]
RAGGED += [(2, 7, 1025), (3, 20, 2100)]
# Each path once.
SAME = [("nvfp4", "nvfp4"), ("mxfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("bf16", "nvfp4"), ("fp32", "fp32")]


class Operand:
    """Codes, scales and outer scale of random bytes, or a plain tensor; rows can be picked."""

    def __init__(self, format, codes, scales=None, outer=None):
        self.format, self.codes, self.scales, self.outer = format, codes, scales, outer

    @property
    def parts(self):
        return self.codes, self.scales, self.outer, self.format

    def __getitem__(self, rows):
        outer = self.outer if self.outer is None or self.outer.numel() == 1 else self.outer[rows]
        return Operand(self.format, self.codes[rows], None if self.scales is None else self.scales[rows], outer)

    def for_reference(self):
        if self.scales is None:
            return self.codes
        fmt = fp4ext.formats.get(self.format)
        return self.codes.view(fmt.codes_dtype), self.scales.view(fmt.scale_dtype), self.outer, self.format

    def values(self):
        """Without the outer scale, in fp64."""
        if self.scales is None:
            return self.codes.double()
        codes, scales, _, _ = self.for_reference()
        one = torch.ones(1)
        k = codes.shape[-1] * (2 if self.codes_are_packed() else 1)
        return ops.dequantize(codes, scales, one, self.format, k, "float32").double()

    def codes_are_packed(self):
        return self.format in ("nvfp4", "mxfp4")


def operand(format, rows, k, seed, outer="tensor", scales=None):
    """k elements a row, padded with zeros to the block. `scales`: the range of scale bytes."""
    g = torch.Generator().manual_seed(seed)
    if format in PLAIN:
        return Operand(format, torch.randn(rows, k, generator=g).to(PLAIN[format]))
    fmt = fp4ext.formats.get(format)
    padded = k + -k % fmt.block
    e2m1 = format in ("nvfp4", "mxfp4")
    codes = torch.randint(0, 16 if e2m1 else 256, (rows, padded), generator=g).to(torch.uint8)
    if not e2m1:
        codes[(codes & 0x7F) > (0x7E if format == "mxfp8" else 0x7B)] = 1  # finite
    codes[:, k:] = 0
    if e2m1:
        codes = reference.pack_nibbles(codes)
    low, high = scales or ((0, 0x7F) if format == "nvfp4" else (110, 140))
    scales = torch.randint(low, high, (rows, padded // fmt.block), generator=g).to(torch.uint8)
    globals_ = {"tensor": torch.rand(1, generator=g) + 0.5, "row": torch.rand(rows, 1, generator=g) + 0.5, "none": None}
    return Operand(format, codes, scales, globals_[outer] if format == "nvfp4" else None)


def gemm(x, w, bias=None, out_dtype="float32", **options):
    return ops.gemm(x.parts, w.parts, bias, out_dtype, **options)


def check(each_isa, x, w, bias=None, out_dtype="float32"):
    wanted = reference.gemm(
        x.for_reference(), w.for_reference(), bias, {"float32": torch.float32, "bfloat16": torch.bfloat16}[out_dtype]
    )
    for isa, y in each_isa(lambda: gemm(x, w, bias, out_dtype)):
        assert_bytes_equal(y, wanted, f"{x.format} {tuple(x.codes.shape)} x {w.format} {tuple(w.codes.shape)} {isa}")
    return wanted


# ---- the order of the numerics contract ----


@pytest.mark.parametrize("x_format, w_format", PAIRS, ids=lambda f: f)
def test_every_pair(each_isa, x_format, w_format):
    for m, n, k in ((7, 27, 80), (2, 17, 1040)):
        check(each_isa, operand(x_format, m, k, 1), operand(w_format, n, k, 2))


@pytest.mark.parametrize("x_format, w_format", SAME, ids=lambda f: f)
@pytest.mark.parametrize("m, n, k", RAGGED)
def test_ragged(each_isa, x_format, w_format, m, n, k):
    check(each_isa, operand(x_format, m, k, 3), operand(w_format, n, k, 4))


@pytest.mark.parametrize("x_format, w_format", [("mxfp4", "mxfp4"), ("mxfp4", "nvfp4"), ("mxfp8", "mxfp8_e5m2")])
def test_any_scale_byte(each_isa, x_format, w_format):
    """E8M0 over its whole range: s_x·s_w overflows and vanishes where section 9 says, not where a folded
    factor would."""
    whole = (0, 255)
    x = operand(x_format, 9, 1100, 5, scales=whole)
    w = operand(w_format, 30, 1100, 6, scales=whole if w_format != "nvfp4" else None)
    y = check(each_isa, x, w)
    assert not y.isfinite().all()
    # One block at a time, so that what is small is seen at all.
    for k in range(0, 64, 32):
        cut = slice(k // 2, k // 2 + 16) if x.codes_are_packed() else slice(k, k + 32)
        blocks = slice(k // 32, k // 32 + 1)
        w_blocks = slice(k // 16, k // 16 + 2) if w_format == "nvfp4" else blocks
        check(
            each_isa,
            Operand(x_format, x.codes[:, cut], x.scales[:, blocks]),
            Operand(w_format, w.codes[:, cut], w.scales[:, w_blocks]),
        )


@pytest.mark.parametrize("x_format, w_format", [*SAME, ("mxfp4", "mxfp4"), ("fp16", "mxfp4")], ids=lambda f: f)
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_a_decode_is_a_prefill(each_isa, x_format, w_format, m):
    """A few rows take a way of their own through w: the bits of many, whatever the scale bytes: negative, NaN."""
    for n, k, scales in ((41, 1072, None), (17, 271, None), (9, 16, (0, 256)), (33, 544, (0x70, 0x90))):
        x, w = operand(x_format, 40, k, 29, outer="row"), operand(w_format, n, k, 30, scales=scales)
        wanted = gemm(x, w)
        for isa, y in each_isa(lambda: gemm(x[:m], w)):  # noqa: B023
            assert_bytes_equal(y, wanted[:m], f"{isa} {n}x{k}")
        if k < 300:
            check(each_isa, x[:m], w)


def test_fp32_products_are_fused(each_isa):
    """Cancelling sums of products that no fp32 holds: multiply, then add, gives other bits."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 64, generator=g), torch.randn(33, 64, generator=g)
    x, w = torch.cat([x, x], 1), torch.cat([w, -w * (1 + 2**-12)], 1)
    check(each_isa, Operand("fp32", x), Operand("fp32", w))


# ---- what must not matter ----


@pytest.mark.parametrize("x_format, w_format", SAME, ids=lambda f: f)
def test_a_row_depends_on_itself_alone(each_isa, x_format, w_format):
    x, w = operand(x_format, 70, 1100, 7, outer="row"), operand(w_format, 60, 1100, 8)
    shuffled = torch.randperm(70, generator=torch.Generator().manual_seed(9))
    many = torch.arange(70).repeat(10)[:600]  # more rows than are packed at a time
    for isa, y in each_isa(lambda: gemm(x, w)):
        for rows in (shuffled, torch.tensor([3]), torch.tensor([69]), torch.arange(5, 22), many):
            assert_bytes_equal(gemm(x[rows], w), y[rows], f"{isa} rows {rows[:3].tolist()}…")
        columns = torch.tensor([59, 0, 31])
        assert_bytes_equal(gemm(x, w[columns]), y[:, columns], f"{isa} columns")


@pytest.mark.parametrize("x_format, w_format", SAME, ids=lambda f: f)
def test_threads(each_isa, x_format, w_format):
    x, w = operand(x_format, 130, 1100, 10), operand(w_format, 300, 1100, 11)
    torch.set_num_threads(1)
    alone = gemm(x, w)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_bytes_equal(gemm(x, w), alone, f"{threads} threads")


@pytest.mark.parametrize("m, n, k", [(130, 100, 1100), (1, 1000, 2048)])
def test_isas_agree_on_larger(each_isa, m, n, k):
    for x_format, w_format in SAME:
        x, w = operand(x_format, m, k, 12), operand(w_format, n, k, 13)
        first = None
        for isa, y in each_isa(lambda: gemm(x, w)):  # noqa: B023
            first = y if first is None else first
            assert_bytes_equal(y, first, f"{x_format} {w_format} {isa}")


def test_accumulate_fast_is_the_law_here():
    x, w = operand("nvfp4", 5, 96, 14), operand("nvfp4", 7, 96, 15)
    assert_bytes_equal(gemm(x, w, accumulate="fast", backend="cpu"), gemm(x, w))


def test_views_of_any_stride(each_isa):
    """Transposed and strided operands, scales and bias: contiguity is not assumed."""
    x, w = operand("nvfp4", 6, 80, 16, outer="row"), operand("nvfp4", 11, 80, 17)
    bias = torch.randn(22)[::2]
    wanted = gemm(x, w, bias.clone())
    odd = lambda t: torch.stack([t, t], -1)[..., 0]  # noqa: E731
    turned = lambda t: t.t().contiguous().t()  # noqa: E731
    views = (
        Operand("nvfp4", turned(x.codes), odd(x.scales), odd(x.outer)),
        Operand("nvfp4", odd(w.codes), turned(w.scales), w.outer),
    )
    assert not views[0].codes.is_contiguous() and not views[1].scales.is_contiguous()
    for isa, y in each_isa(lambda: gemm(*views, bias)):
        assert_bytes_equal(y, wanted, isa)


# ---- the epilogue ----


@pytest.mark.parametrize("bias_dtype", [None, *PLAIN.values()])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_bias_and_output(each_isa, bias_dtype, out_dtype):
    for x_format, w_format in SAME:
        x, w = operand(x_format, 5, 112, 18, outer="row"), operand(w_format, 29, 112, 19, outer="row")
        bias = None if bias_dtype is None else (torch.randn(29) * 100).to(bias_dtype)
        check(each_isa, x, w, bias, out_dtype)


def test_the_product_of_global_scales_neither_overflows_nor_vanishes(each_isa):
    """1e38·1e38 and 1e-38·1e-38 are no fp32, but y is."""
    for outer in (1e38, 1e-38):
        x, w = operand("nvfp4", 3, 32, 20, scales=(1, 9)), operand("nvfp4", 5, 32, 21, scales=(1, 9))
        x.outer, w.outer = torch.tensor([outer]), torch.tensor([1 / outer])
        assert check(each_isa, x, w).isfinite().all()
        w.outer = torch.tensor([outer])
        check(each_isa, x, w)


def test_bf16_rounds_to_even(each_isa):
    x = Operand("fp32", torch.tensor([[1 + 2**-8], [1 + 3 * 2**-8], [1 + 2**-8 + 2**-20], [-1 - 2**-8], [3.4e38]]))
    y = check(each_isa, x, Operand("fp32", torch.ones(1, 1)), out_dtype="bfloat16")
    assert y.flatten().tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0, float("inf")]


# ---- not a number ----


@pytest.mark.parametrize(
    "format, nan", [("nvfp4", 0x7F), ("nvfp4", 0xFF), ("mxfp4", 0xFF), ("mxfp8", 0xFF), ("mxfp8_e5m2", 0xFF)]
)
def test_nan_scales_reach_their_rows_and_columns(each_isa, format, nan):
    x, w = operand(format, 6, 1100, 22), operand(format, 31, 1100, 23)
    x.codes[2, :32] = 0  # a NaN block has codes 0, as quantize writes it
    x.scales[2, 1] = nan
    w.scales[30, -1] = nan
    wanted = torch.zeros(6, 31, dtype=torch.bool)
    wanted[2] = wanted[:, 30] = True
    for isa, y in each_isa(lambda: gemm(x, w)):
        assert torch.equal(y.isnan(), wanted), isa
        assert (y[wanted].view(torch.int32) == 0x7FC00000).all(), f"{isa}: not the canonical NaN"
    for isa, y in each_isa(lambda: gemm(x, w, out_dtype="bfloat16")):
        assert torch.equal(y.isnan(), wanted), isa


def test_special_elements(each_isa):
    """E4M3's NaN, E5M2's NaN and infinities, and those of plain operands."""
    ones = Operand("fp32", torch.ones(3, 32))
    codes = torch.zeros(256, 32, dtype=torch.uint8)
    codes[:, 5] = torch.arange(256)
    one = torch.full((256, 1), 127, dtype=torch.uint8)
    for format in ("mxfp8", "mxfp8_e5m2"):
        y = check(each_isa, ones, Operand(format, codes, one))
        values = codes[:, 5].view(fp4ext.formats.get(format).codes_dtype).float()
        assert_bytes_equal(y[0], values + 0.0, format)  # a sum from +0 is never -0
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 65504.0, 2**-24, -0.0])
    for format, dtype in PLAIN.items():
        check(each_isa, Operand(format, special.to(dtype)[:, None].contiguous()), Operand("fp32", torch.ones(9, 1)))


# ---- bounds ----


def test_exact_on_integers(each_isa):
    """Every partial sum an integer below 2^24: bitwise equality."""
    g = torch.Generator().manual_seed(24)
    x, w = (torch.randint(-6, 7, (n, 2080), generator=g).float() for n in (9, 40))
    x[x.abs() == 5] = 4
    w[w.abs() == 5] = 4
    wanted = (x.double() @ w.double().T).float()
    for format in ("nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"):
        a, b = (integers(format, t) for t in (x, w))
        for isa, y in each_isa(lambda: gemm(a, b)):  # noqa: B023
            assert_bytes_equal(y, wanted, f"{format} {isa}")
            assert_bytes_equal(gemm(a[:2], b), wanted[:2], f"{format} {isa}, a decode")


def integers(format, t):
    fmt = fp4ext.formats.get(format)
    encode = {"mxfp8": reference.encode_e4m3, "mxfp8_e5m2": reference.encode_e5m2}.get(format, reference.encode_e2m1)
    codes = encode(t)
    if format in ("nvfp4", "mxfp4"):
        codes = reference.pack_nibbles(codes)
    one = 0x38 if format == "nvfp4" else 127
    return Operand(format, codes, torch.full((len(t), t.shape[1] // fmt.block), one, dtype=torch.uint8))


@pytest.mark.parametrize("x_format, w_format", SAME, ids=lambda f: f)
@pytest.mark.parametrize("data", ["random", "adversarial"])
@pytest.mark.parametrize("m", [3, 5])
def test_bounds_at_large_k(each_isa, x_format, w_format, data, m):
    """The derived bound on sums that cancel, 2^-20 on random data; 3 rows are a decode, 5 are not."""
    k = 65536
    x, w = operand(x_format, m, k, 25, outer="none"), operand(w_format, 25, k, 26, outer="none")
    if data == "adversarial":  # second half cancels the first: the exact sum is tiny, the terms are not
        for o in (x, w):
            o.codes[:, o.codes.shape[1] // 2 :] = o.codes[:, : o.codes.shape[1] // 2]
            if o.scales is not None:
                o.scales[:, o.scales.shape[1] // 2 :] = o.scales[:, : o.scales.shape[1] // 2]
        half = x.codes[:, x.codes.shape[1] // 2 :]
        half.copy_(-half if x.format in PLAIN else half ^ (0x88 if x.codes_are_packed() else 0x80))
    a, b = x.values(), w.values()
    exact, size = a @ b.T, a.abs() @ b.abs().T
    limit = size * (2**-20 if data == "random" else (k / 16 + 2) * 2**-24)
    for isa, y in each_isa(lambda: gemm(x, w)):
        assert ((y.double() - exact).abs() <= limit + exact.abs() * 2**-24).all(), isa


@pytest.mark.parametrize("x_format, w_format", SAME, ids=lambda f: f)
@pytest.mark.parametrize("m", [1, 40])
def test_added_to_what_is_there(each_isa, x_format, w_format, m):
    """out += y in fp32, the bias first: weight gradients over micro-batches."""
    x, w, bias = operand(x_format, m, 80, 31), operand(w_format, 27, 80, 32), torch.randn(27)
    before = torch.randn(m, 27) * 10
    wanted = reference.gemm(x.for_reference(), w.for_reference(), bias, out=before)
    assert not torch.equal(wanted, gemm(x, w) + (before + bias))

    def add():
        out = before.clone()
        ops.gemm_add(x.parts, w.parts, bias, out)
        return out

    for isa, out in each_isa(add):
        assert_bytes_equal(out, wanted, isa)


@pytest.mark.parametrize(
    "out, says",
    [
        (torch.zeros(3, 27, dtype=torch.bfloat16), "out is bfloat16; accepted: float32"),
        (torch.zeros(3, 26), r"out has shape \[3, 26\]; accepted: \[3, 27\]"),
        (torch.zeros(27, 3).T, "out has gaps between its elements; accepted: a contiguous tensor"),
    ],
)
def test_out_that_does_not_fit_is_refused(out, says):
    x, w = operand("fp32", 3, 16, 1), operand("fp32", 27, 16, 2)
    with pytest.raises(RuntimeError, match=says):
        ops.gemm_add(x.parts, w.parts, None, out)


# ---- shapes ----


def test_leading_dimensions():
    x, w = operand("nvfp4", 24, 80, 27, outer="row"), operand("mxfp8", 10, 80, 28)
    flat = gemm(x, w)
    x.codes, x.scales, x.outer = (t.unflatten(0, (2, 3, 4)) for t in (x.codes, x.scales, x.outer))
    assert_bytes_equal(gemm(x, w), flat.unflatten(0, (2, 3, 4)))
    one = Operand("bf16", torch.randn(80).bfloat16())  # a vector
    assert gemm(one, w).shape == (10,)


@pytest.mark.parametrize("x_format, w_format", SAME, ids=lambda f: f)
def test_what_lies_behind_is_not_read(each_isa, x_format, w_format):
    """M = 48, K = 96, everything around the operands 0xFF: NaN as a scale, as a code, as a plain number."""
    x, w = operand(x_format, 48, 96, 33), operand(w_format, 40, 96, 34)
    wanted = {m: gemm(x[:m], w) for m in (48, 1)}

    def surrounded(o):
        def put(t):
            whole = (
                torch.full(((len(t) + 6) * t[0].nbytes,), 0xFF, dtype=torch.uint8).view(t.dtype).view(-1, t.shape[1])
            )
            whole[3:-3] = t
            return whole[3:-3]

        return Operand(o.format, put(o.codes), None if o.scales is None else put(o.scales), o.outer)

    x, w = surrounded(x), surrounded(w)
    for isa, _ in each_isa(lambda: None):
        for m, y in wanted.items():
            assert_bytes_equal(gemm(x[:m], w), y, f"{isa} M={m}")


@pytest.mark.slow
@pytest.mark.parametrize("x_format, w_format", [("nvfp4", "nvfp4"), ("mxfp8", "mxfp8")], ids=lambda f: f)
@pytest.mark.parametrize("m", [1, 6])
def test_indices_of_64_bits(x_format, w_format, m):
    """2^31 elements and more of w, then of x. Pages of zeros that nobody writes take no memory."""
    k, n = 4096, 2**31 // 4096 + 8
    few, last = operand(x_format, m, k, 35), operand(w_format, 8, k, 36)
    w = Operand(w_format, *(None if t is None else t.new_zeros(n, t.shape[1]) for t in (last.codes, last.scales)))
    w.outer = last.outer
    w.codes[-8:], w.scales[-8:] = last.codes, last.scales
    assert w.codes.numel() * (2 if w.codes_are_packed() else 1) > 2**31
    y = gemm(few, w)
    assert_bytes_equal(y[:, -8:], gemm(few, last))
    assert (y[:, :-8] == 0).all()
    if m == 1:
        assert_bytes_equal(gemm(w, few)[-8:], gemm(last, few))


def test_compiled_equals_eager():
    """K = 16(4n+1), where a scale column stands alone in its four."""
    torch._dynamo.reset()
    for k in (16, 80, 144):
        x, w = operand("nvfp4", 5, k, 37), operand("nvfp4", 7, k, 38)
        f = lambda a, b, c, d: ops.gemm((a, b, None, "nvfp4"), (c, d, None, "nvfp4"), None, "float32")  # noqa: E731
        operands = (x.codes, x.scales, w.codes, w.scales)
        assert_bytes_equal(torch.compile(f, fullgraph=True, backend="aot_eager")(*operands), f(*operands))
    torch._dynamo.reset()


@pytest.mark.parametrize("format", FORMATS)
def test_empty(each_isa, format):
    bias = torch.tensor([1.0, -2.0, 0.5])
    for isa, y in each_isa(lambda: gemm(operand(format, 0, 64, 1), operand(format, 3, 64, 2), bias)):
        assert y.shape == (0, 3), isa
    for isa, y in each_isa(lambda: gemm(operand(format, 5, 64, 1), operand(format, 0, 64, 2))):
        assert y.shape == (5, 0), isa
    for isa, y in each_isa(lambda: gemm(operand(format, 2, 0, 1), operand(format, 3, 0, 2), bias)):
        assert_bytes_equal(y, bias.expand(2, 3), isa)
    assert_bytes_equal(gemm(operand(format, 2, 0, 1), operand(format, 3, 0, 2)), torch.zeros(2, 3))


def bad(**change):
    """Arguments of the op gemm, one of them wrong."""
    x, w = operand("nvfp4", 4, 64, 1), operand("mxfp8", 6, 64, 2)
    arguments = dict(
        x_codes=x.codes, x_scales=x.scales, x_global=x.outer, x_format="nvfp4", w_codes=w.codes, w_scales=w.scales,
        w_global=None, w_format="mxfp8", bias=None, out_dtype="float32", accumulate="invariant", backend="auto",
    )  # fmt: skip
    return arguments | change


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(x_format="fp4"), "unknown x_format 'fp4'; accepted: nvfp4, mxfp8"),
        (dict(w_format="e4m3"), "unknown w_format 'e4m3'"),
        (dict(out_dtype="float64"), "unknown out_dtype 'float64'; accepted: bfloat16, float32"),
        (dict(accumulate="sloppy"), "unknown accumulate 'sloppy'; accepted: invariant, fast"),
        (dict(backend="native"), "unknown backend 'native'; accepted: auto, cpu"),
        (dict(x_codes=torch.zeros(4, 32)), "x_codes is float32; accepted: uint8"),
        (dict(x_scales=None), "x_scales is None; accepted for nvfp4"),
        (dict(x_scales=torch.zeros(4, 5, dtype=torch.uint8)), r"x_scales has shape \[4, 5\]; accepted: \[4, 4\]"),
        (dict(x_scales=torch.zeros(4, 4)), "x_scales is float32; accepted: uint8"),
        (dict(x_global=torch.ones(3, 1)), r"x_global has shape \[3, 1\]; accepted: one value, or .* of 4"),
        (dict(x_global=torch.ones(1, dtype=torch.float64)), "x_global is float64; accepted: float32"),
        (dict(w_codes=torch.zeros(2, 6, 64, dtype=torch.uint8)), r"w_codes has shape \[2, 6, 64\]; accepted: \[N, K\]"),
        (dict(w_codes=torch.zeros(6, 40, dtype=torch.uint8)), "w_codes stores 40 elements a row; .* a multiple of 32"),
        (
            dict(w_codes=torch.zeros(6, 128, dtype=torch.uint8), w_scales=torch.zeros(6, 4, dtype=torch.uint8)),
            "x_codes stores 64 elements a row and w_codes 128",
        ),
        (dict(w_format="fp32", w_codes=torch.zeros(6, 64)), "w_scales is a tensor; accepted for fp32: None"),
        (dict(bias=torch.zeros(5)), r"bias has shape \[5\]; accepted: \[6\]"),
        (dict(bias=torch.zeros(6, dtype=torch.int32)), "bias is int32; accepted: float32, bfloat16, float16"),
        (dict(x_codes=torch.zeros((), dtype=torch.uint8)), r"x_codes has shape \[\]; accepted: \[.., K\]"),
    ],
)
def test_refusals(change, says):
    with pytest.raises(RuntimeError, match=says):
        torch.ops.fp4ext.gemm(**bad(**change))
