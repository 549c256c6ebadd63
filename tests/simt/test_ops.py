"""The CUDA ops as a whole, on the SIMT machine: what they check, allocate and launch gives the CPU op's bytes."""

import pytest
import torch

from fp4ext.policy.spec import Spec
from fp4ext.testing import assert_bytes_equal, assert_same_quantized, generate

from .operands import operand
from .test_dispatch import by
from .test_quantize import KEYS, RNG, SHARD


def qkv(m=5, t=33, dtype=torch.bfloat16):
    return [
        generate("gaussian", 2, h, rows, 8, seed=i, dtype=dtype) for i, (h, rows) in enumerate(((4, m), (2, t), (2, t)))
    ]


@pytest.mark.parametrize("start", [None, torch.tensor([0, 28])], ids=["last", "given"])
def test_attention(simt, start):
    q, k, v = qkv()
    for views in ((q, k, v), (q.mT.contiguous().mT, k, v.transpose(1, 2).contiguous().transpose(1, 2))):
        y = simt.ops.attention(*views, start, 0.5)
        assert_bytes_equal(y, torch.ops.fp4ext.attention(q, k, v, start, 0.5), "attention")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (q[0], k, v, None), r"q has shape \[4, 5, 8\]; accepted: \[batch, heads, rows, head_dim\]"),
        (lambda q, k, v: (q, k, v.float(), None), "v is float32; accepted: bfloat16"),
        (lambda q, k, v: (q[:, :3], k, v, None), "q has 3 heads and k 2; accepted: a multiple"),
        (lambda q, k, v: (q, k[:, :, :4], v[:, :, :4], None), "k has 4 rows and q 5; accepted: at least as many"),
        (lambda q, k, v: (q, k, v, torch.zeros(3, dtype=torch.int64)), r"start has shape \[3\]; accepted: \[2\]"),
    ],
)
def test_attention_refuses(simt, change, message):
    with pytest.raises(RuntimeError, match=message):
        simt.ops.attention(*change(*qkv()), 0.5)


@pytest.mark.parametrize(
    "m, sm, kernel",
    [(5, 90, "decode"), (20, 90, "invariant"), (20, 90, "fast"), (20, 120, "sm120"), (20, 100, "sm100")],
)
def test_gemm_add(simt, device, m, sm, kernel):
    """y_old + y in fp32, once, by each kernel that a product can take; a bias comes first."""
    device(sm)
    x, w, bias = operand("nvfp4", m, 128, seed=1), operand("nvfp4", 24, 128, seed=2), torch.randn(24)
    choices = ("fast", "fast") if kernel == "fast" else ("invariant", "auto")
    out = torch.randn(m, 24)
    wanted = out + simt.ops.gemm(*x.parts, *w.parts, bias, "float32", *choices)
    simt.ops.gemm_add(*x.parts, *w.parts, bias, out, *choices)
    assert_bytes_equal(out, wanted, kernel)
    for wrong, why in (
        (out.bfloat16(), "out is bfloat16; accepted: float32"),
        (out[:3], r"out has shape \[3, 24\]"),
        (out.mT.contiguous().mT, "gaps"),
    ):
        with pytest.raises(RuntimeError, match=why):
            simt.ops.gemm_add(*x.parts, *w.parts, bias, wrong, *choices)


@pytest.mark.parametrize("by_row", [False, True])
def test_grouped_gemm_over_tokens(simt, device, by_row):
    """Each expert's part of the contraction, with its own global scales: what it gives alone."""
    device(90)
    ends, block = [16, 16, 48], 16
    x, w = operand("nvfp4", 20, 64, seed=3), operand("nvfp4", 24, 64, seed=4)
    shape = lambda rows: (3, rows if by_row else 1, 1)  # noqa: E731
    x.outer, w.outer = torch.rand(shape(20)) + 0.5, torch.rand(shape(24)) + 0.5
    offsets = torch.tensor(ends, dtype=torch.int32)
    y = simt.ops.grouped_gemm(*x.parts, *w.parts, offsets, "float32", "invariant", "auto")
    assert y.shape == (3, 20, 24)
    start = 0
    for e, end in enumerate(ends):
        alone = []
        for t in (x, w):
            part = operand("nvfp4", t.codes.shape[0], end - start, seed=0)
            part.codes = t.codes[:, start // 2 : end // 2].contiguous()
            part.scales, part.outer = t.scales[:, start // block : end // block].contiguous(), t.outer[e]
            alone.append(part)
        wanted = by(simt, "invariant", *alone) if end > start else torch.zeros(20, 24)
        assert_bytes_equal(y[e], wanted, f"expert {e}")
        start = end


def test_grouped_gemm_refuses(simt, device):
    device(90)
    x, w = operand("nvfp4", 20, 64, seed=3), operand("nvfp4", 2, 24, 64, seed=4)
    offsets = torch.tensor([8, 20], dtype=torch.int32)
    for parts, ends, why in (
        (w, offsets.long(), "offsets is int64; accepted: int32"),
        (w, offsets[:0], r"offsets has shape \[0\]; accepted: \[E\]"),
        (
            w,
            torch.tensor([8, 8, 20], dtype=torch.int32),
            r"w_codes has shape \[2, 24, 32\]; accepted for 3 offsets: \[3, N, K\]",
        ),
    ):
        with pytest.raises(RuntimeError, match=why):
            simt.ops.grouped_gemm(*x.parts, *parts.parts, ends, "float32", "invariant", "auto")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize("offset", [1, 4])
def test_codes_at_any_address(simt, format, offset):
    """Views into a flat buffer, as checkpoints and arenas have them: read by dequantize and requantize."""
    x = generate("student_t3", 70, 96, seed=12)
    codes, scales, outer = torch.ops.fp4ext.quantize(x, Spec(format).key, -1, None, 0, None)
    flat = torch.cat([codes.new_zeros(offset), codes.flatten()])
    q = flat[offset:].view(codes.shape), scales, outer, format, 96
    assert_bytes_equal(simt.ops.dequantize(*q, "float32"), torch.ops.fp4ext.dequantize(*q, "float32"), format)
    args = *q, KEYS[0], -2, RNG, 1
    assert_same_quantized(simt.ops.requantize(*args), torch.ops.fp4ext.requantize(*args), format)


ENDS = torch.tensor([0, 5, 5, 133, 150], dtype=torch.int32)  # an expert without rows, and unassigned rows


@pytest.mark.parametrize("key", KEYS)
def test_grouped_quantize(simt, key):
    """Each expert of a matrix, and each matrix of a stack, alone: codes, scales and outer scales of the CPU's op."""
    x = generate("student_t3", 156, 72, seed=1, dtype=torch.bfloat16)
    stack = x[:150].reshape(3, 50, 72)
    for axis, rng in ((-1, RNG), (-2, SHARD)):
        for t, ends in ((x, ENDS), (stack, None)):
            wanted = torch.ops.fp4ext.grouped_quantize(t, ends, key, axis, rng, 2)
            got = simt.ops.grouped_quantize(t, ends, key, axis, rng, 2)
            assert_same_quantized(got, wanted, f"{key} axis={axis} {tuple(t.shape)}")


@pytest.mark.parametrize("key", ["nvfp4/amax/nearest/1x16/expert/none", KEYS[3], KEYS[7]])
def test_grouped_requantize(simt, key):
    """Of what was quantized for a forward, as the backward wants it."""
    x = generate("student_t3", 156, 72, seed=2)
    for t, ends in ((x, ENDS), (x[:150].reshape(3, 50, 72), None)):
        q = *torch.ops.fp4ext.grouped_quantize(t, ends, KEYS[0], -1, None, 0), "nvfp4", 72, ends
        wanted = torch.ops.fp4ext.grouped_requantize(*q, key, -2, RNG, 1)
        assert_same_quantized(simt.ops.grouped_requantize(*q, key, -2, RNG, 1), wanted, f"{key} {tuple(t.shape)}")


def test_grouped_quantize_refuses(simt):
    x, key = torch.ones(8, 32), KEYS[0]
    for t, ends, why in (
        (x, None, r"x has shape \[8, 32\]; accepted: \[T, K\] with offsets"),
        (x[None], ENDS, r"x has shape \[1, 8, 32\]; accepted: \[T, K\] with offsets"),
        (x, ENDS.long(), "offsets is int64; accepted: int32"),
        (x, ENDS[:0], r"offsets has shape \[0\]; accepted: \[E\]"),
    ):
        with pytest.raises(RuntimeError, match=why):
            simt.ops.grouped_quantize(t, ends, key, -1, None, 0)
