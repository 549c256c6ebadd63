"""On a real device: the CPU's bytes, the law's bounds, and the same bits from every batch and every repeat.

What the SIMT machine proves of the sources, here of the chip (`make test-gpu`). Skipped where there is none.
"""

import pytest
import torch

import fp4ext
from fp4ext.testing import KINDS, assert_bytes_equal, assert_same_quantized, generate

from ..simt.operands import operand
from ..simt.test_gemm import DECODED_PAIRS, PAIRS, check_bound
from ..simt.test_quantize import ALL, KEYS, RNG, SHARD

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not fp4ext._C.cuda_rooms, reason="needs a CUDA device and a build for it"
)
GPU = "cuda"


def to_gpu(o):
    moved = (t if t is None else t.to(GPU) for t in (o.codes, o.scales, o.outer))
    return type(o)(o.format, *moved)


def to_cpu(tensors):
    return [t.cpu() for t in tensors]


def gemm(x, w, bias=None, out_dtype="float32", backend="auto"):
    return torch.ops.fp4ext.gemm(*x.parts, *w.parts, bias, out_dtype, "invariant", backend)


def backends():
    return [name for name in ("emulated", "native") if fp4ext.backends()[name].startswith("available")]


# ---- quantization ----


@pytest.mark.parametrize("spec", ALL, ids=lambda s: s.key)
def test_every_spec(spec):
    shape = (2, 48, 160) if spec.outer == "expert" else (200, 272)
    turn = ALL.index(spec)
    for axis in (-1, -2):
        x = generate(KINDS[turn % len(KINDS)], *shape, seed=turn, dtype=torch.bfloat16)
        wanted = torch.ops.fp4ext.quantize(x, spec.key, axis, SHARD, turn % 3, None)
        got = torch.ops.fp4ext.quantize(x.to(GPU), spec.key, axis, SHARD.to(GPU), turn % 3, None)
        assert_same_quantized(to_cpu(got), wanted, f"{spec} axis={axis}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_data(kind, dtype):
    x = generate(kind, 300, 400, seed=5, dtype=dtype)
    for key in KEYS:
        wanted = torch.ops.fp4ext.quantize_rowcol(x, key, key, RNG, SHARD, 1)
        got = to_cpu(torch.ops.fp4ext.quantize_rowcol(x.to(GPU), key, key, RNG.to(GPU), SHARD.to(GPU), 1))
        assert_same_quantized(got[:3], wanted[:3], f"{key} rows")
        assert_same_quantized(got[3:], wanted[3:], f"{key} columns")


@pytest.mark.parametrize("key", KEYS)
def test_dequantize_requantize_swizzle(key):
    x = generate("student_t3", 133, 100, seed=12)
    q = torch.ops.fp4ext.quantize(x, "nvfp4/sweep/nearest/1x16/row/none", -1, None, 0, None)
    on_gpu = [t.to(GPU) for t in q]
    for axis in (-1, -2):
        wanted = torch.ops.fp4ext.requantize(*q, "nvfp4", 100, key, axis, RNG, 1)
        got = torch.ops.fp4ext.requantize(*on_gpu, "nvfp4", 100, key, axis, RNG.to(GPU), 1)
        assert_same_quantized(to_cpu(got), wanted, key)
    got = torch.ops.fp4ext.dequantize(*on_gpu, "nvfp4", 100, "bfloat16")
    assert_bytes_equal(got.cpu(), torch.ops.fp4ext.dequantize(*q, "nvfp4", 100, "bfloat16"), "dequantize")
    assert_bytes_equal(torch.ops.fp4ext.swizzle(on_gpu[1]).cpu(), torch.ops.fp4ext.swizzle(q[1]), "swizzle")


def test_200_repeats():
    """8192², every copy the same bytes (fault 7)."""
    x = torch.randn(8192, 8192, device=GPU, dtype=torch.bfloat16)
    key = "nvfp4/sweep/eden/1x16/tensor/128x2"
    first = None
    for _ in range(200):
        q = torch.ops.fp4ext.quantize_rowcol(x, key, key, RNG.to(GPU), SHARD.to(GPU), 0)
        first = first or q
        assert all(torch.equal(a, b) for a, b in zip(q, first, strict=True))


def test_a_graph_replays():
    """RNG state is a tensor: another state, written between replays, gives what eager code gives."""
    x, rng = torch.randn(256, 256, device=GPU, dtype=torch.bfloat16), RNG.to(GPU)
    w = fp4ext.quantize(torch.randn(128, 256, device=GPU, dtype=torch.bfloat16), "nvfp4")

    def step():
        q = fp4ext.quantize(x, "nvfp4", rounding="stochastic", rng=rng)
        return q.codes, fp4ext.gemm(q, w)

    step()  # the first product on a device tests its kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, y = step()
    for offset in range(3):
        rng[1] = offset
        x.copy_(torch.randn_like(x))
        graph.replay()
        wanted_codes, wanted_y = step()
        assert torch.equal(codes, wanted_codes) and torch.equal(y, wanted_y)


# ---- GEMM ----


@pytest.mark.parametrize("x_format, w_format", PAIRS)
def test_gemm(x_format, w_format):
    for backend in backends():
        for m, n, k in ((1, 16, 128), (130, 200, 1088), (16, 640, 4224), (257, 129, 80)):
            if backend == "native" and (x_format != w_format or x_format not in ("nvfp4", "mxfp8") or k % 128):
                continue
            x, w = operand(x_format, m, k, seed=1, outer="row"), operand(w_format, n, k, seed=2)
            y = gemm(to_gpu(x), to_gpu(w), backend=backend)
            check_bound(y.cpu(), x, w, truncate=True)
            x, w = operand(x_format, m, k, seed=1, integers=True), operand(w_format, n, k, seed=2, integers=True)
            wanted = torch.ops.fp4ext.gemm(*x.parts, *w.parts, None, "bfloat16", "invariant", "cpu")
            y = gemm(to_gpu(x), to_gpu(w), out_dtype="bfloat16", backend=backend)
            assert_bytes_equal(y.cpu(), wanted, f"{backend} {x_format} {w_format} {m} {n} {k}")


@pytest.mark.parametrize("x_format, w_format", DECODED_PAIRS)
def test_rows_are_invariant(x_format, w_format):
    """Decode = prefill, and every cut of a batch gives the same bits."""
    x, w = to_gpu(operand(x_format, 300, 2048, seed=3, outer="row")), to_gpu(operand(w_format, 512, 2048, seed=4))
    for backend in backends():
        if backend == "native" and (x_format != w_format or x_format not in ("nvfp4", "mxfp8")):
            continue
        whole = gemm(x, w, backend=backend)
        for start, end in ((0, 1), (7, 23), (100, 108), (299, 300), (3, 260)):
            assert torch.equal(gemm(x[start:end], w, backend=backend), whole[start:end]), (backend, start, end)


@pytest.mark.parametrize("offsets", [[0, 1, 128, 255, 384, 384, 415], [0, 0, 64, 64], [0, 0, 0]], ids=str)
def test_grouped(offsets):
    experts, rows = len(offsets), offsets[-1] + 2
    x, w = to_gpu(operand("nvfp4", rows, 256, seed=7)), to_gpu(operand("nvfp4", experts, 160, 256, seed=8, outer="row"))
    ends = torch.tensor(offsets, dtype=torch.int32, device=GPU)
    for backend in backends():
        y = torch.ops.fp4ext.grouped_gemm(*x.parts, *w.parts, ends, "float32", "invariant", backend)
        start = 0
        for e, end in enumerate(offsets):
            assert torch.equal(y[start:end], gemm(x[start:end], w[e], backend=backend))
            start = end
        assert not y[start:].any()


def test_other_streams_and_devices():
    """Work goes to the current stream of the tensor's device."""
    x = torch.randn(512, 512, dtype=torch.bfloat16)
    wanted = torch.ops.fp4ext.quantize(x, KEYS[0], -1, None, 0, None)
    for i in range(torch.cuda.device_count()):
        stream = torch.cuda.Stream(i)
        with torch.cuda.stream(stream):
            got = torch.ops.fp4ext.quantize(x.to(f"cuda:{i}", non_blocking=True), KEYS[0], -1, None, 0, None)
        stream.synchronize()
        assert_same_quantized(to_cpu(got), wanted, f"cuda:{i}")
