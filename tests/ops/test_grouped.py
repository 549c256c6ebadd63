"""grouped_quantize and grouped_gemm, the ops: the reference's bytes, and those of each expert alone."""

import pytest
import torch

from fp4ext import Spec, gemm, grouped_gemm, grouped_quantize, quantize, reference
from fp4ext.functional import ops
from fp4ext.testing import assert_bytes_equal, assert_same_quantized, generate

SPECS = {
    "amax": Spec(),
    "sweep": Spec(scale="sweep"),
    "pow2": Spec(outer="pow2"),
    "row": Spec(outer="row"),
    "expert": Spec(outer="expert"),
    "row pow2": Spec(scale="sweep", outer="row_pow2"),
    "expert pow2": Spec(outer="expert_pow2"),
    "tile": Spec(scale="four_over_six", block="16x16"),
    "tile stochastic": Spec(rounding="stochastic", block="16x16"),
    "stochastic": Spec(rounding="stochastic"),
    "rht": Spec(rht="16"),
    "eden": Spec("nvfp4", "amax", "eden", rht="128"),
    "eden block": Spec("nvfp4", "amax", "eden_block", rht="128"),
    "eden sweep": Spec("nvfp4", "sweep", "eden", rht="128x2"),
    "eden row": Spec("nvfp4", "sweep", "eden", outer="row", rht="64x2"),
    "mxfp8": Spec("mxfp8"),
    "mxfp8 stochastic": Spec("mxfp8", rounding="stochastic", rht="32"),
    "mxfp4": Spec("mxfp4", "floor"),
}
# Experts without rows, of one row, around 128 rows, none with rows at all.
COUNTS = {
    "ragged": [0, 1, 127, 128, 129, 0, 31],
    "one": [0, 0, 64, 0],
    "none": [0, 0, 0],
    "three": [33, 1, 20],
    "small": [3, 16, 1, 0, 40],
}
RNG = torch.tensor([0x123456789ABCDEF, 11])
PAIRS = [("nvfp4", "nvfp4"), ("mxfp4", "nvfp4"), ("mxfp8", "mxfp8")]
PAIRS += [("bf16", "nvfp4"), ("nvfp4", "mxfp8"), ("fp32", "fp32")]


def offsets(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def experts_of(counts):
    """The slice of rows of each expert."""
    ends = [0, *offsets(counts).tolist()]
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def tokens(counts, k, rest=3, seed=0):
    """Rows of experts whose sizes differ a thousandfold, then `rest` unassigned rows: NaN."""
    gains = torch.tensor([1.0, 100.0, 0.01])[torch.arange(len(counts)) % 3].repeat_interleave(torch.tensor(counts))
    x = generate("student_t3", sum(counts), k, seed=seed) * gains[:, None]
    return torch.cat([x, torch.full((rest, k), torch.nan)])


def pieces(q):
    return q.codes.contiguous(), q.scales.contiguous(), torch.empty(0) if q.global_scale is None else q.global_scale


# ---- quantize ----


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("counts", ["ragged", "small", "none"])
def test_rows_of_experts(each_isa, name, axis, counts):
    """Any counts; NaN in unassigned rows reaches nothing."""
    counts, spec = COUNTS[counts], SPECS[name]
    x = tokens(counts, 40)
    wanted = reference.grouped_quantize(x, spec, offsets(counts), axis, RNG, "dy")
    for isa, q in each_isa(lambda: grouped_quantize(x, spec, offsets(counts), axis=axis, rng=RNG, role="dy")):
        assert_same_quantized(pieces(q), wanted, f"{name} {axis} {isa}")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_stacks(each_isa, name, axis):
    """Experts' rows that are no multiple of a tile; each is as if alone."""
    w, spec = generate("outliers30", 3, 37, 40) * torch.tensor([1.0, 100.0, 0.01])[:, None, None], SPECS[name]
    wanted = reference.grouped_quantize(w, spec, None, axis, RNG, "w")
    for isa, q in each_isa(lambda: grouped_quantize(w, spec, axis=axis, rng=RNG, role="w")):
        assert_same_quantized(pieces(q), wanted, f"{name} {axis} {isa}")
        alone = [
            quantize(
                m,
                spec.of_one_expert(),
                axis=axis,
                rng=shard(e * q.shape[1]),
                role="w",
            )
            for e, m in enumerate(w)
        ]
        x_hat = q.dequantize()
        for e, a in enumerate(alone):
            assert_bytes_equal(q.codes[e], a.codes, f"{name} codes of expert {e}")
            assert_bytes_equal(x_hat[e], a.dequantize(), f"{name} expert {e}")


def shard(row):
    return torch.tensor([*RNG.tolist(), row, 0])


@pytest.mark.parametrize("name", SPECS)
def test_an_expert_is_quantized_as_if_alone(name):
    counts, spec = COUNTS["ragged"], SPECS[name]
    x = tokens(counts, 40)
    alone = spec.of_one_expert()
    rows = grouped_quantize(x, spec, offsets(counts), rng=RNG)
    columns = grouped_quantize(x, spec, offsets(counts), axis=-2, rng=RNG)
    x_hat, xt_hat = rows.dequantize(), columns.dequantize()
    for e, at in enumerate(experts_of(counts)):
        q = quantize(x[at], alone, rng=shard(at.start))
        assert_bytes_equal(rows.codes[at], q.codes, f"{name} expert {e}")
        assert_bytes_equal(x_hat[at], q.dequantize(), f"{name} expert {e}")
        q = quantize(x[at], alone, axis=-2, rng=shard(e * 40))
        mine = columns.expert(e)
        assert_bytes_equal(mine.codes.contiguous(), q.codes, f"{name} expert {e}, columns")
        assert_bytes_equal(mine.scales.contiguous(), q.scales, f"{name} expert {e}, columns")
        assert_bytes_equal(xt_hat[:, at], q.dequantize(), f"{name} expert {e}, columns")
    assert (x_hat[sum(counts) :] == 0).all() and (xt_hat[:, sum(counts) :] == 0).all()


@pytest.mark.parametrize(
    "first, name", [("sweep", name) for name in SPECS] + [("mxfp8", "eden sweep"), ("row", "mxfp8")]
)
@pytest.mark.parametrize("axis", [-1, -2])
def test_requantize(each_isa, first, name, axis):
    """From what the forward stored, without a whole copy: the bytes of two steps."""
    counts, spec = COUNTS["small"], SPECS[name]
    stored = grouped_quantize(tokens(counts, 40), SPECS[first], offsets(counts))
    wanted = grouped_quantize(stored.dequantize(torch.float32), spec, offsets(counts), axis=axis, rng=RNG)
    for isa, q in each_isa(lambda: grouped_quantize(stored, spec, offsets(counts), axis=axis, rng=RNG)):
        assert_same_quantized(pieces(q), pieces(wanted), f"{name} {isa}")
    stored = grouped_quantize(generate("student_t3", 3, 24, 40), SPECS[first])
    wanted = grouped_quantize(stored.dequantize(torch.float32), spec, axis=axis, rng=RNG)
    for isa, q in each_isa(lambda: grouped_quantize(stored, spec, axis=axis, rng=RNG)):
        assert_same_quantized(pieces(q), pieces(wanted), f"{name} stack {isa}")


@pytest.mark.parametrize("name", ["amax", "stochastic", "eden sweep", "row", "mxfp8"])
def test_threads_and_strides_do_not_matter(name):
    counts = COUNTS["ragged"]
    x = tokens(counts, 80)
    strided = x.T.contiguous().T
    for axis in (-1, -2):
        torch.set_num_threads(1)
        wanted = pieces(grouped_quantize(x, SPECS[name], offsets(counts), axis=axis, rng=RNG))
        for threads in (2, 3):
            torch.set_num_threads(threads)
            got = grouped_quantize(strided, SPECS[name], offsets(counts), axis=axis, rng=RNG)
            assert_same_quantized(pieces(got), wanted, f"{name} {threads}")


# ---- gemm ----


def operand(kind, x, at=None, axis=-1):
    """What grouped_gemm takes, and what the reference's takes."""
    if kind in ("bf16", "fp32"):
        plain = x.to({"bf16": torch.bfloat16, "fp32": torch.float32}[kind])
        plain = plain if axis == -1 else plain.mT
        return plain, plain
    q = grouped_quantize(x, Spec(kind), at, axis=axis)
    return q, (*pieces(q), kind)


def alone(kind, x, axis=-1):
    if kind in ("bf16", "fp32"):
        return operand(kind, x, axis=axis)[0]
    return quantize(x, Spec(kind), axis=axis)


@pytest.mark.parametrize("x_kind, w_kind", PAIRS, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_rows(each_isa, x_kind, w_kind, counts):
    """Fprop and dgrad. Each expert's rows are those of gemm; unassigned rows are zero."""
    counts = COUNTS[counts]
    n = 160 if len(counts) == 3 else 24
    at, x, w = offsets(counts), tokens(counts, 80), generate("gaussian", len(counts), n, 80, seed=1)
    (xq, xr), (wq, wr) = operand(x_kind, x, at), operand(w_kind, w)
    exact = reference.grouped_gemm(xr, wr, at, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        wanted = exact.to(dtype)
        for isa, y in each_isa(lambda: grouped_gemm(xq, wq, at, dtype)):  # noqa: B023
            assert_bytes_equal(y, wanted, isa)
            assert (y[sum(counts) :] == 0).all()
    y = grouped_gemm(xq, wq, at, torch.float32)
    for e, rows in enumerate(experts_of(counts)):
        dense = gemm(alone(x_kind, x[rows]), alone(w_kind, w[e]), out_dtype=torch.float32)
        assert_bytes_equal(y[rows], dense, f"expert {e}")


@pytest.mark.parametrize("x_kind, w_kind", PAIRS, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_tokens(each_isa, x_kind, w_kind, counts):
    """Wgrad. Each expert's product is gemm's over its own tokens, zero where it has none."""
    counts = COUNTS[counts]
    at, dy, x = offsets(counts), tokens(counts, 50), tokens(counts, 40, seed=1)
    (a, ar), (b, br) = operand(x_kind, dy, at, -2), operand(w_kind, x, at, -2)
    exact = reference.grouped_gemm(ar, br, at, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        wanted = exact.to(dtype)
        for isa, y in each_isa(lambda: grouped_gemm(a, b, at, dtype)):  # noqa: B023
            assert_bytes_equal(y, wanted, isa)
    y = grouped_gemm(a, b, at, torch.float32)
    assert y.shape == (len(counts), 50, 40)
    for e, rows in enumerate(experts_of(counts)):
        dense = gemm(alone(x_kind, dy[rows], -2), alone(w_kind, x[rows], -2), out_dtype=torch.float32)
        assert_bytes_equal(y[e], dense, f"expert {e}")
        assert counts[e] or (y[e] == 0).all()


def test_a_rotation_cancels_in_every_expert():
    """Lengths of 16, 32 … 128 side by side: both operands of an expert take the same one."""
    counts = [128, 16, 37, 64, 0, 1]
    at, dy, x = offsets(counts), generate("gaussian", 246, 48), generate("gaussian", 246, 32, seed=1)
    spec = SPECS["eden sweep"]
    a, b = (grouped_quantize(t, spec, at, axis=-2, rng=RNG, role=r) for t, r in ((dy, "dy"), (x, "x")))
    y = grouped_gemm(a, b, at, torch.float32)
    for e, rows in enumerate(experts_of(counts)):
        exact = dy[rows].T @ x[rows]
        assert (y[e] - exact).square().sum() <= 0.04 * exact.square().sum(), e


def test_outer_scales_of_rows_and_experts(each_isa):
    counts = COUNTS["small"]
    at, x, w = offsets(counts), tokens(counts, 64), tokens([30] * 5, 64, 0, seed=1).view(5, 30, 64)
    for outer in ("row", "pow2", "tensor"):
        xq, wq = grouped_quantize(x, Spec(outer=outer), at), grouped_quantize(w, Spec(outer=outer))
        assert xq.global_scale.shape == (len(x), 1)
        assert wq.global_scale.shape == (5, 30 if outer == "row" else 1, 1)
        wanted = reference.grouped_gemm((*pieces(xq), "nvfp4"), (*pieces(wq), "nvfp4"), at, torch.float32)
        for isa, y in each_isa(lambda: grouped_gemm(xq, wq, at, torch.float32)):  # noqa: B023
            assert_bytes_equal(y, wanted, f"{outer} {isa}")
        a, b = (grouped_quantize(t, Spec(outer=outer), at, axis=-2) for t in (x, x[:, :16]))
        wanted = reference.grouped_gemm((*pieces(a), "nvfp4"), (*pieces(b), "nvfp4"), at, torch.float32)
        for isa, y in each_isa(lambda: grouped_gemm(a, b, at, torch.float32)):  # noqa: B023
            assert_bytes_equal(y, wanted, f"{outer} tokens {isa}")


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_many_experts_and_threads(kind):
    """More products than are packed at a time, and long ones."""
    g = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 40, (64,), generator=g).tolist() + [1500]
    at, x, w = offsets(counts), tokens(counts, 1040), generate("gaussian", 65, 24, 1040, seed=1)
    xq, wq = operand(kind, x, at)[0], operand(kind, w)[0]
    a, b = operand(kind, x[:, :70], at, -2)[0], operand(kind, x[:, 70:96], at, -2)[0]
    torch.set_num_threads(1)
    y, dw = grouped_gemm(xq, wq, at), grouped_gemm(a, b, at)
    for e in (0, 63, 64):
        rows = experts_of(counts)[e]
        assert_bytes_equal(y[rows], gemm(alone(kind, x[rows]), alone(kind, w[e])), f"expert {e}")
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_bytes_equal(grouped_gemm(xq, wq, at), y)
        assert_bytes_equal(grouped_gemm(a, b, at), dw)


def test_what_lies_behind_is_not_read():
    """The room that is kept for other offsets may hold anything."""
    counts = COUNTS["small"]
    at, dy, x = offsets(counts), tokens(counts, 24, 0), tokens(counts, 40, 0, seed=1)
    a, b = (grouped_quantize(t, "nvfp4", at, axis=-2) for t in (dy, x))
    wanted, used = grouped_gemm(a, b, at), sum(-(-n // 16) for n in counts)
    for t in (a, b):
        assert (t.codes[:, used * 8 :] == 0).all() and (t.scales[:, used:].view(torch.uint8) == 0).all()
        t.codes[:, used * 8 :] = 0xFF
        t.scales.view(torch.uint8)[:, used:] = 0xFF
    assert t.scales.shape[1] > used
    assert_bytes_equal(grouped_gemm(a, b, at), wanted)


def test_views_of_any_stride():
    counts = COUNTS["small"]
    at, x, w = offsets(counts), tokens(counts, 64), generate("gaussian", 5, 24, 64)
    xq, wq = x.bfloat16(), operand("nvfp4", w)[0]
    odd = torch.stack([at, at], -1)[:, 0]
    assert_bytes_equal(grouped_gemm(xq.T.contiguous().T, wq, odd), grouped_gemm(xq, wq, at))


# ---- refusals ----


def bad_gemm(**change):
    x, w = (
        grouped_quantize(torch.ones(6, 64), "nvfp4", offsets([4, 2])),
        grouped_quantize(torch.ones(2, 8, 64), "mxfp8"),
    )
    arguments = dict(
        x_codes=x.codes, x_scales=x.scales.view(torch.uint8), x_global=x.global_scale, x_format="nvfp4",
        w_codes=w.codes.view(torch.uint8), w_scales=w.scales.view(torch.uint8), w_global=None, w_format="mxfp8",
        offsets=offsets([4, 2]), out_dtype="float32", accumulate="invariant", backend="auto",
    )  # fmt: skip
    return arguments | change


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(offsets=torch.tensor([4, 6])), "offsets is int64; accepted: int32"),
        (dict(offsets=offsets([4, 2])[None]), r"offsets has shape \[1, 2\]; accepted: \[E\]"),
        (
            dict(offsets=torch.tensor([5, 4], dtype=torch.int32)),
            r"offsets\[1\] is 4 after 5; accepted: ends that never de",
        ),
        (dict(offsets=torch.tensor([-1, 4], dtype=torch.int32)), r"offsets\[0\] is -1 after 0"),
        (dict(offsets=offsets([4, 3])), r"offsets\[1\] is 7; accepted: at most 6, the rows of x"),
        (dict(offsets=offsets([4, 1, 1])), r"w_codes has shape \[2, 8, 64\]; accepted for 3 offsets: \[3, N, K\]"),
        (dict(w_codes=torch.zeros(64, dtype=torch.uint8)), r"w_codes has shape \[64\]; accepted: \[E, N, K\], or"),
        (
            dict(x_global=torch.ones(4, 1)),
            r"x_global has shape \[4, 1\]; accepted: one value, or \[.., 1\] with one a row",
        ),
        (dict(backend="native"), "unknown backend 'native'; accepted: auto, cpu"),
        (dict(out_dtype="float64"), "unknown out_dtype 'float64'"),
    ],
)
def test_gemm_refuses(change, says):
    with pytest.raises(RuntimeError, match=says):
        torch.ops.fp4ext.grouped_gemm(**bad_gemm(**change))


def test_tokens_that_do_not_fit_are_refused():
    a = grouped_quantize(torch.ones(40, 32), "nvfp4", offsets([3, 37]), axis=-2)
    fits = lambda at, codes=a.codes, scales=a.scales: ops.grouped_gemm(  # noqa: E731
        (codes, scales, a.global_scale, "nvfp4"), (torch.ones(5, 40), None, None, "fp32"), at, "float32"
    )
    assert fits(offsets([3, 37])).shape == (2, 32, 5)
    with pytest.raises(
        RuntimeError, match="x_codes stores 48 elements a row; accepted: at least 64, each expert's tokens"
    ):
        fits(offsets([3, 37]), a.codes[:, :24], a.scales[:, :3])
    with pytest.raises(RuntimeError, match=r"offsets\[1\] is 41; accepted: at most 40"):
        fits(offsets([4, 37]))


@pytest.mark.parametrize(
    "x, at, says",
    [
        (torch.ones(6, 32), None, r"x has shape \[6, 32\]; accepted: \[T, K\] with offsets, or \[E, N, K\] without"),
        (torch.ones(2, 6, 32), offsets([6]), r"x has shape \[2, 6, 32\]; accepted"),
        (torch.ones(6, 32), offsets([4, 3]), r"offsets\[1\] is 7; accepted: at most 6, the rows of x"),
        (torch.ones(6, 32), torch.tensor([3, 2], dtype=torch.int32), r"offsets\[1\] is 2 after 3"),
        (torch.ones(6, 32), torch.empty(0, dtype=torch.int32), r"offsets has shape \[0\]; accepted: \[E\]"),
    ],
)
def test_quantize_refuses(x, at, says):
    with pytest.raises(RuntimeError, match=says):
        grouped_quantize(x, "nvfp4", at)
