"""gemm, the function that users call: operands of every kind, defaults, refusals. The order of sums is tests/ops/'s."""

import itertools

import pytest
import torch

from fp4ext import Spec, formats, gemm, quantize, reference
from fp4ext.testing import assert_bytes_equal, generate

KINDS = [*formats.FORMATS, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operand(kind, *shape, seed=0, **how):
    """A QTensor of a format, or a plain tensor of a dtype."""
    if isinstance(kind, torch.dtype):
        return generate("gaussian", *shape, seed=seed, dtype=kind)
    return quantize(generate("gaussian", *shape, seed=seed), kind, **how)


def to_reference(t):
    return t if isinstance(t, torch.Tensor) else (t.codes, t.scales, t.global_scale, t.format)


@pytest.mark.parametrize("x_kind, w_kind", list(itertools.product(KINDS, KINDS)), ids=str)
def test_any_pair_of_operands(x_kind, w_kind):
    """Equal to the reference; K = 40 is padded to 48 by one format, to 64 by another, by a plain tensor not at all."""
    x, w = operand(x_kind, 5, 40), operand(w_kind, 7, 40, seed=1)
    for out_dtype in (torch.float32, torch.bfloat16):
        wanted = reference.gemm(to_reference(x), to_reference(w), None, out_dtype)
        assert_bytes_equal(gemm(x, w, out_dtype=out_dtype), wanted)


@pytest.mark.parametrize("bias", DTYPES)
def test_bias(bias):
    x, w, b = operand("nvfp4", 5, 64), operand("nvfp4", 7, 64, seed=1), generate("gaussian", 7, dtype=bias)
    wanted = reference.gemm(to_reference(x), to_reference(w), b, torch.float32)
    assert_bytes_equal(gemm(x, w, b, torch.float32), wanted)
    assert_bytes_equal(gemm(x, w, b.expand(2, 7)[1], torch.float32), wanted)
    assert not torch.equal(gemm(x, w, out_dtype=torch.float32), wanted)


def test_defaults():
    x, w = operand("nvfp4", 5, 64), operand("nvfp4", 7, 64, seed=1)
    y = gemm(x, w)
    assert y.dtype == torch.bfloat16 and y.shape == (5, 7)
    assert_bytes_equal(gemm(x, w, None, torch.bfloat16, accumulate="fast", backend="cpu"), y)


def test_out():
    """Added to in place, and returned; a parameter's gradient may be it."""
    x, w, b = operand("nvfp4", 2, 5, 64), operand("nvfp4", 7, 64, seed=1), torch.randn(7)
    weight = torch.nn.Parameter(torch.zeros(2, 5, 7))
    weight.grad = out = torch.ones(2, 5, 7)
    wanted = out + gemm(x, w, b, torch.float32)
    assert gemm(x, w, b, out=out) is out
    assert_bytes_equal(weight.grad, wanted)
    with pytest.raises(ValueError, match="out is on meta; accepted: cpu"):
        gemm(x, w, out=out.to("meta"))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(), (0,), (2, 3), (2, 0, 3), (2, 1, 3)])
def test_leading_dimensions(kind, lead):
    x, w = operand(kind, *lead, 64, **({"outer": "row"} if kind == "nvfp4" else {})), operand("nvfp4", 7, 64, seed=1)
    y = gemm(x, w, out_dtype=torch.float32)
    plain = x if isinstance(x, torch.Tensor) else x.dequantize()
    assert y.shape == (*lead, 7)
    torch.testing.assert_close(y, plain.float() @ w.dequantize().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("m, n, k", [(0, 7, 64), (5, 0, 64), (5, 7, 0), (0, 0, 0)])
def test_empty_operands(m, n, k):
    for kind in ("nvfp4", "mxfp8", torch.float32):
        y = gemm(operand(kind, m, k), operand(kind, n, k), torch.arange(float(n)), torch.float32)
        assert_bytes_equal(y, torch.arange(float(n)).expand(m, n))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", torch.bfloat16], ids=str)
def test_a_row_depends_on_itself_alone(kind):
    plain, w = generate("gaussian", 33, 1040), operand("nvfp4", 19, 1040, seed=1)

    def as_operand(t):
        if isinstance(kind, torch.dtype):
            return t.to(kind)
        return quantize(t, kind, outer="row" if kind == "nvfp4" else None)

    y = gemm(as_operand(plain), w)
    for i in (0, 17, 32):
        assert_bytes_equal(gemm(as_operand(plain[i]), w), y[i])


def test_strided_plain_operands():
    x, w = operand(torch.float32, 5, 64), operand(torch.bfloat16, 7, 64, seed=1)
    assert_bytes_equal(gemm(x.T.contiguous().T, w.T.contiguous().T), gemm(x, w))


@pytest.mark.parametrize("kind", [*formats.FORMATS, torch.float32], ids=str)
def test_inputs_as_they_come(kind):
    """M = 1, K = 80; no rows; transposed, strided, flipped views; 3-D and 4-D inputs."""
    as_operand = lambda t: t.to(kind) if isinstance(kind, torch.dtype) else quantize(t, kind)  # noqa: E731
    x, w = generate("gaussian", 2, 3, 1, 80), operand("nvfp4", 7, 80, seed=1)
    views = {
        "one row": x[0, 0],
        "no rows": x[:0, 0, 0],
        "3-D": x[0],
        "4-D": x,
        "transposed": x.transpose(0, 1),
        "every second": generate("gaussian", 6, 160)[::2, ::2],
        "flipped": x.flip(-1)[1].flip(0),
        "expanded": x[0, 0].expand(5, 80),
    }
    for name, t in views.items():
        y = gemm(as_operand(t), w, out_dtype=torch.float32)
        assert y.shape == (*t.shape[:-1], 7), name
        assert_bytes_equal(y, gemm(as_operand(t.clone(memory_format=torch.contiguous_format)), w, None, torch.float32))


@pytest.mark.parametrize("outer", ["tensor", "pow2", "row"])
def test_outer_scales_of_both_operands(outer):
    x, w = (generate("gaussian", n, 64, seed=n) * 10.0 ** torch.arange(-3, n - 3)[:, None] for n in (5, 7))
    x, w = quantize(x, outer=outer), quantize(w, outer=outer)
    assert_bytes_equal(gemm(x, w), reference.gemm(to_reference(x), to_reference(w)))


def test_a_rotation_cancels():
    spec = Spec("nvfp4", "sweep", rht="128x2")
    x, w = generate("outliers30", 16, 256), generate("gaussian", 24, 256, seed=1)
    y = gemm(quantize(x, spec, rng=3), quantize(w, spec, rng=3, role="w"), out_dtype=torch.float32)
    assert (y - x @ w.T).square().mean() < 0.03 * (x @ w.T).square().mean()


def test_a_nan_block_stays_in_its_row():
    x = generate("gaussian", 5, 64)
    x[2, 3] = float("nan")
    y = gemm(quantize(x), operand("nvfp4", 7, 64, seed=1))
    assert y.isnan().any(1).tolist() == [False, False, True, False, False] and y[2].isnan().all()


def test_no_gradient_flows():
    plain, bias = torch.ones(5, 64, requires_grad=True), torch.ones(5, requires_grad=True)
    assert not gemm(plain, X()).requires_grad and not gemm(X(), plain, bias).requires_grad


def X(format="nvfp4", *shape):
    return operand(format, *(shape or (5, 64)))


BAD = {
    "unknown accumulate 'slow'; accepted: invariant, fast": (
        ValueError, lambda: gemm(X(), X(), accumulate="slow")),
    "unknown backend 'native' on cpu; accepted: auto, cpu": (ValueError, lambda: gemm(X(), X(), backend="native")),
    "out_dtype is torch.float16; accepted: torch.bfloat16, torch.float32": (
        TypeError, lambda: gemm(X(), X(), out_dtype=torch.float16)),
    "x (5, 64) and w (5, 80) differ in K": (ValueError, lambda: gemm(X(), X("nvfp4", 5, 80))),
    "x (5, 63) and w (5, 64) differ in K": (ValueError, lambda: gemm(X("nvfp4", 5, 63), X())),
    "w has shape (2, 5, 64); accepted: [N, K]": (ValueError, lambda: gemm(X(), X("nvfp4", 2, 5, 64))),
    "w has shape (64,); accepted: [N, K]": (ValueError, lambda: gemm(X(), X("nvfp4", 64))),
    "x () and w (5, 64) differ in K": (ValueError, lambda: gemm(torch.ones(()), X())),
    "x is list; accepted: a torch.Tensor": (TypeError, lambda: gemm([1.0], X())),
    "w is NoneType; accepted: a torch.Tensor": (TypeError, lambda: gemm(X(), None)),
    "x is torch.float64; accepted: float32, bfloat16, float16": (
        TypeError, lambda: gemm(torch.ones(5, 64).double(), X())),
    "w is torch.int8; accepted: ": (TypeError, lambda: gemm(X(), torch.ones(5, 64, dtype=torch.int8))),
    "bias has shape [4]; accepted: [5]": (RuntimeError, lambda: gemm(X(), X(), torch.ones(4))),
    "bias has shape [1, 5]; accepted: [5]": (RuntimeError, lambda: gemm(X(), X(), torch.ones(1, 5))),
    "bias is torch.float64; accepted: ": (TypeError, lambda: gemm(X(), X(), torch.ones(5).double())),
    "bias is QTensor; accepted: ": (TypeError, lambda: gemm(X(), X(), X())),
    "w is on meta; accepted: cpu": (ValueError, lambda: gemm(X(), X().to("meta"))),
    "bias is on meta; accepted: cpu": (ValueError, lambda: gemm(X(), X(), torch.ones(5, device="meta"))),
    "x_scales has shape [5, 3]; accepted: [5, 4]": (RuntimeError, lambda: gemm(changed(scales=X().scales[:, 1:]), X())),
    "w_scales has shape [4, 4]; accepted: [5, 4]": (RuntimeError, lambda: gemm(X(), changed(scales=X().scales[1:]))),
    "x_scales is None; accepted for nvfp4: ": (RuntimeError, lambda: gemm(changed(scales=None), X())),
    "x_scales is float8_e8m0fnu; accepted: ": (
        RuntimeError, lambda: gemm(changed(scales=X().scales.view(torch.float8_e8m0fnu)), X())),
    "x_global has shape [4, 1]; accepted: one value, or [.., 1]": (
        RuntimeError, lambda: gemm(changed(global_scale=torch.ones(4, 1)), X())),
}  # fmt: skip


def changed(**pieces):
    """X with other pieces, which its constructor would refuse: the op has to refuse them too."""
    q = X()
    for name, piece in pieces.items():
        object.__setattr__(q, name, piece)
    return q


@pytest.mark.parametrize("message", BAD, ids=lambda m: m)
def test_refusals(message):
    with pytest.raises(BAD[message][0]) as error:
        BAD[message][1]()
    assert message in str(error.value)
