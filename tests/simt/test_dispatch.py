"""Which kernel a product takes on which device, and the test that a native one must pass first."""

import pytest
import torch

from fp4ext.testing import assert_bytes_equal

from .operands import operand


def gemm(simt, x, w, backend="auto", bias=None):
    return simt.ops.gemm(*x.parts, *w.parts, bias, "float32", "invariant", backend)


def by(simt, kernel, x, w):
    return simt.ops.run_gemm(kernel, *x.parts, *w.parts, None, None, "float32")


SLOW = pytest.mark.slow  # chips that run another one's kernels
CHIPS = [(80, None), (90, None), (100, "sm100"), (120, "sm120")]
CHIPS += [pytest.param(103, "sm100", marks=SLOW), pytest.param(121, "sm120", marks=SLOW)]


@pytest.mark.parametrize("sm, native", CHIPS)
def test_the_default(simt, device, sm, native):
    """Native where one takes the operands; else emulated, and few rows by the decode kernel, bit for bit."""
    i = device(sm)
    for format, k, taken in (("nvfp4", 128, True), ("nvfp4", 80, False), ("mxfp8", 128, True), ("mxfp4", 128, False)):
        x, w = operand(format, 20, k, seed=1), operand(format, 24, k, seed=2)
        kernel = native if native and taken else "invariant"
        assert_bytes_equal(gemm(simt, x, w), by(simt, kernel, x, w), f"sm_{sm} {format} {k}")
        emulated = gemm(simt, x, w, "emulated")
        assert_bytes_equal(emulated, by(simt, "invariant", x, w), "emulated")
        assert_bytes_equal(gemm(simt, x[:3], w, "emulated"), emulated[:3], "few rows")
    emulated, native_line = simt.ops.status(i).split("\n")
    assert emulated.startswith("available: ") and f"sm_{sm}" in emulated
    assert native_line.startswith(
        "available: passed its self-test" if native else f"built, but no native kernel for sm_{sm}"
    )


def test_what_is_asked_for_is_what_runs_or_raises(simt, device):
    device(90)
    x, w = operand("nvfp4", 4, 128, seed=3), operand("nvfp4", 8, 128, seed=4)
    with pytest.raises(RuntimeError, match="'native' is not available: no native kernel for sm_90"):
        gemm(simt, x, w, "native")
    device(120)
    assert_bytes_equal(gemm(simt, x, w, "native"), by(simt, "sm120", x, w), "native")
    odd = operand("nvfp4", 4, 80, seed=3), operand("nvfp4", 8, 80, seed=4)
    with pytest.raises(RuntimeError, match="takes NVFP4"):
        gemm(simt, *odd, "native")
    with pytest.raises(
        RuntimeError, match="unknown backend for CUDA tensors 'cpu'; accepted: auto, emulated, fast, native"
    ):
        gemm(simt, x, w, "cpu")
    device(75)
    with pytest.raises(RuntimeError, match="sm_75; accepted: sm_80 and later"):
        gemm(simt, x, w)


def test_grouped_gemm(simt, device):
    device(90)
    x, w = operand("nvfp4", 12, 96, seed=5, outer="row"), operand("nvfp4", 3, 24, 96, seed=6)
    w.outer = torch.tensor([1.0, 100.0, 0.01]).view(3, 1, 1)
    offsets = torch.tensor([5, 5, 11], dtype=torch.int32)
    y = simt.ops.grouped_gemm(*x.parts, *w.parts, offsets, "float32", "invariant", "auto")
    assert_bytes_equal(y, simt.ops.run_gemm("invariant", *x.parts, *w.parts, None, offsets, "float32"), "grouped")
    assert y[:11].abs().sum(1).gt(0).all() and not y[11:].any()


def test_plain_operands(simt, device):
    device(80)
    x, w = operand("bf16", 5, 48, seed=7), operand("nvfp4", 8, 48, seed=8)
    assert_bytes_equal(gemm(simt, x, w), by(simt, "invariant", x, w), "bf16 activations")


@pytest.mark.parametrize("x_format, w_format", [("fp32", "fp32"), ("fp16", "nvfp4"), ("bf16", "fp16")])
@pytest.mark.parametrize("sm", [80, 120])
def test_what_bf16_does_not_hold(simt, device, sm, x_format, w_format):
    """The CPU's bytes, few rows or many, however they are accumulated; refused where it would be rounded to bf16."""
    device(sm)
    for m in (5, 20):
        x, w, bias = operand(x_format, m, 128, seed=7), operand(w_format, 8, 128, seed=8), torch.randn(8)
        for backend, accumulate in (("auto", "invariant"), ("emulated", "invariant"), ("auto", "fast")):
            args = *x.parts, *w.parts, bias, "bfloat16", accumulate
            wanted = torch.ops.fp4ext.gemm(*args, "cpu")
            assert_bytes_equal(simt.ops.gemm(*args, backend), wanted, f"{backend} {accumulate}")
        out = torch.ones(m, 8)
        wanted = out.clone()
        torch.ops.fp4ext.gemm_add(*x.parts, *w.parts, bias, wanted, "invariant", "cpu")
        simt.ops.gemm_add(*x.parts, *w.parts, bias, out, "invariant", "auto")
        assert_bytes_equal(out, wanted, "added")
    with pytest.raises(
        RuntimeError, match="'fast' multiplies in bfloat16; accepted for float32 and float16: auto, emu"
    ):
        simt.ops.gemm(*x.parts, *w.parts, None, "float32", "fast", "fast")
    with pytest.raises(RuntimeError, match="takes NVFP4"):
        gemm(simt, x, w, "native")
    offsets = torch.tensor([3, 3, 19], dtype=torch.int32)
    w = operand(w_format, 3, 8, 128, seed=9)
    args = *x.parts, *w.parts, offsets, "float32", "invariant"
    assert_bytes_equal(simt.ops.grouped_gemm(*args, "auto"), torch.ops.fp4ext.grouped_gemm(*args, "cpu"), "experts")


@pytest.mark.parametrize("kernel", ["sm120", "sm100", "sm100_pairs"])
def test_the_self_test_passes(simt, kernel):
    simt.configure(seed=1, asynchronous="random")
    assert simt.ops.self_test(kernel) == ""


def test_same_bits(simt):
    """Of pairs and single blocks; not of a kernel that adds up K in another order, integers as it may."""
    assert simt.ops.same_bits("sm100_pairs", "sm100") == ""
    why = simt.ops.same_bits("sm120", "sm100")
    assert why.startswith("NVFP4 270x100x1088: y[") and " instead of " in why


def test_pairs_for_many_rows(simt, device):
    i = device(100)
    assert [simt.ops.route(*of) for of in ((128, 1), (129, 1), (512, 4), (513, 4))] == ["native", "native by pairs"] * 2
    assert simt.ops.status(i).endswith("; for many rows by pairs of thread blocks, which give the same bits")
    x, w = operand("nvfp4", 140, 256, seed=9, outer="row"), operand("nvfp4", 70, 256, seed=10)
    whole = gemm(simt, x, w)
    assert_bytes_equal(whole[130:133], gemm(simt, x[130:133], w), "a few rows alone")
    i = device(120)
    assert simt.ops.route(1000, 1) == "native"
    assert "pairs" not in simt.ops.status(i)
