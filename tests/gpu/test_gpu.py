"""On a real device: the CPU's bytes, the contract's bounds, and the same bits from every batch and every repeat.

What the SIMT machine proves of the sources, here of the chip (`make test-gpu`). Skipped where there is none.
"""

import pytest
import torch

import fp4ext
from fp4ext.functional import ops
from fp4ext.testing import KINDS, assert_bytes_equal, assert_same_quantized, generate

from ..simt.operands import operand
from ..simt.test_gemm import DECODED_PAIRS, PAIRS, check_bound, tokens
from ..simt.test_gemm_lanes import PAIRS as LANES
from ..simt.test_ops import qkv
from ..simt.test_quantize import ALL, KEYS, RNG, SHARD

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not fp4ext._C.cuda_kernel_sets, reason="needs a CUDA device and a build for it"
)
GPU = "cuda"


def to_gpu(o):
    moved = (t if t is None else t.to(GPU) for t in (o.codes, o.scales, o.outer))
    return type(o)(o.format, *moved)


def to_cpu(tensors):
    return [t.cpu() for t in tensors]


def gemm(x, w, bias=None, out_dtype="float32", backend="auto", accumulate="invariant"):
    return torch.ops.fp4ext.gemm(*x.parts, *w.parts, bias, out_dtype, accumulate, backend)


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
    """8192², every copy the same bytes."""
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
            check_bound(y.cpu(), x, w, native=x_format if backend == "native" else None)
            x, w = operand(x_format, m, k, seed=1, integers=True), operand(w_format, n, k, seed=2, integers=True)
            wanted = torch.ops.fp4ext.gemm(*x.parts, *w.parts, None, "bfloat16", "invariant", "cpu")
            y = gemm(to_gpu(x), to_gpu(w), out_dtype="bfloat16", backend=backend)
            assert_bytes_equal(y.cpu(), wanted, f"{backend} {x_format} {w_format} {m} {n} {k}")


@pytest.mark.parametrize("x_format, w_format", LANES)
def test_what_bf16_does_not_hold(x_format, w_format):
    """fp32 and fp16, beside anything: the CPU's bytes, dense, over rows and over tokens; so rows are invariant."""
    for i, (m, n, k) in enumerate(((1, 16, 128), (130, 200, 1088), (16, 640, 4224), (257, 129, 85))):
        x, w = operand(x_format, m, k, seed=i, outer="row"), operand(w_format, n, k, seed=9)
        wanted = torch.ops.fp4ext.gemm(*x.parts, *w.parts, None, "float32", "invariant", "cpu")
        assert_bytes_equal(gemm(to_gpu(x), to_gpu(w)).cpu(), wanted, f"{x_format} {w_format} {m} {n} {k}")
    offsets = torch.tensor([0, 5, 5, 128, 250], dtype=torch.int32)
    x, w = operand(x_format, 260, 96, seed=1), operand(w_format, 5, 48, 96, seed=2)
    wanted = ops.grouped_gemm(x.parts, w.parts, offsets, "float32", "invariant", "cpu")
    y = ops.grouped_gemm(to_gpu(x).parts, to_gpu(w).parts, offsets.to(GPU), "float32", "invariant", "auto")
    assert_bytes_equal(y.cpu(), wanted, "rows")
    x, w = (tokens(format, rows, offsets.tolist(), rows)[0] for format, rows in ((x_format, 40), (w_format, 70)))
    wanted = ops.grouped_gemm(x.parts, w.parts, offsets, "float32", "invariant", "cpu")
    y = ops.grouped_gemm(to_gpu(x).parts, to_gpu(w).parts, offsets.to(GPU), "float32", "invariant", "auto")
    assert_bytes_equal(y.cpu(), wanted, "tokens")


@pytest.mark.parametrize("x_format, w_format", PAIRS)
def test_fast(x_format, w_format):
    """torch's product of what was decoded: within the bound, and exact on integers."""
    for m, n, k in ((17, 16, 128), (130, 200, 1088), (257, 129, 80)):
        x, w = operand(x_format, m, k, seed=1, outer="row"), operand(w_format, n, k, seed=2)
        y = gemm(to_gpu(x), to_gpu(w), backend="fast", accumulate="fast")
        check_bound(y.cpu(), x, w)
        x, w = operand(x_format, m, k, seed=1, integers=True), operand(w_format, n, k, seed=2, integers=True)
        wanted = torch.ops.fp4ext.gemm(*x.parts, *w.parts, None, "bfloat16", "invariant", "cpu")
        y = gemm(to_gpu(x), to_gpu(w), out_dtype="bfloat16", backend="fast", accumulate="fast")
        assert_bytes_equal(y.cpu(), wanted, f"{x_format} {w_format} {m} {n} {k}")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_cublas(format):
    if not fp4ext.backends()["cublas"].startswith("available"):
        pytest.skip(fp4ext.backends()["cublas"])
    for m, n, k in ((1, 16, 128), (130, 208, 1088), (16, 640, 4224)):
        x, w = (fp4ext.quantize(torch.randn(rows, k, device=GPU), format) for rows in (m, n))
        bias, out = torch.randn(n, device=GPU), torch.randn(m, n, device=GPU)
        wanted = x.dequantize(torch.float32).double() @ w.dequantize(torch.float32).double().mT
        size = x.dequantize(torch.float32).double().abs() @ w.dequantize(torch.float32).double().abs().mT
        how = {"accumulate": "fast", "backend": "cublas", "out_dtype": torch.float32}
        for y, more in (
            (fp4ext.gemm(x, w, **how), 0),
            (fp4ext.gemm(x, w, bias, **how), bias),
            (fp4ext.gemm(x, w, bias, **how, out=out.clone()), bias + out),
        ):
            assert ((y - (wanted + more)).abs() <= 2.0**-14 * size + 2.0**-20).all(), (m, n, k)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_cublas_of_experts(format):
    """Empty experts, unassigned rows, gains far apart; offsets stay on the device."""
    if "scaled_grouped_mm" not in fp4ext.backends()["cublas"]:
        pytest.skip(fp4ext.backends()["cublas"])
    for ends, n, k in (([0, 5, 5, 300], 48, 96), ([128, 256, 257], 160, 1088), ([0, 0], 16, 32)):
        x, w = torch.randn(ends[-1] + 3, k, device=GPU), torch.randn(len(ends), n, k, device=GPU)
        x[: ends[-1] // 2] *= 100
        offsets = torch.tensor(ends, dtype=torch.int32, device=GPU)
        xq, wq = fp4ext.grouped_quantize(x, format, offsets), fp4ext.grouped_quantize(w, format)
        y = fp4ext.grouped_gemm(xq, wq, offsets, accumulate="fast", backend="cublas")
        rows, of_w, start = xq.dequantize(torch.float32).double(), wq.dequantize(torch.float32).double(), 0
        for e, end in enumerate(ends):
            wanted, size = (a[start:end] @ b[e].mT for a, b in ((rows, of_w), (rows.abs(), of_w.abs())))
            assert ((y[start:end] - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-14 * size).all(), (ends, e)
            start = end
        assert not y[start:].any()


def test_gemm_adds():
    """Weight gradients gather over micro-batches: y_old + y in fp32, by every backend."""
    for m in (5, 130):
        x, w, bias = (
            to_gpu(operand("nvfp4", m, 128, seed=1)),
            to_gpu(operand("nvfp4", 24, 128, seed=2)),
            torch.randn(24, device=GPU),
        )
        for backend, accumulate in (*((b, "invariant") for b in backends()), ("fast", "fast")):
            out = torch.randn(m, 24, device=GPU)
            wanted = out + gemm(x, w, bias, "float32", backend, accumulate)
            torch.ops.fp4ext.gemm_add(*x.parts, *w.parts, bias, out, accumulate, backend)
            assert torch.equal(out, wanted), (m, backend)


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


@pytest.mark.parametrize(
    "offsets", [[0, 1, 128, 255, 384, 384, 415], [0, 300, 301, 700], [0, 0, 64, 64], [0, 0, 0]], ids=str
)
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


def experts_data():
    ends = [0, 5, 5, 128, 300]
    return torch.randn(310, 144, dtype=torch.bfloat16), torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", [s for s in ALL if s.outer != "expert"], ids=lambda s: s.key)
def test_grouped_quantize(spec, axis):
    """Experts of a matrix, and of a stack: the CPU's bytes."""
    x, offsets = experts_data()
    args = spec.key, axis, SHARD, 2
    on_gpu = spec.key, axis, SHARD.to(GPU), 2
    wanted = torch.ops.fp4ext.grouped_quantize(x, offsets, *args)
    got = torch.ops.fp4ext.grouped_quantize(x.to(GPU), offsets.to(GPU), *on_gpu)
    assert_same_quantized(to_cpu(got), wanted, f"{spec} axis={axis} rows")
    stack = x[:300].view(3, 100, 144)
    wanted = torch.ops.fp4ext.grouped_quantize(stack, None, *args)
    assert_same_quantized(
        to_cpu(torch.ops.fp4ext.grouped_quantize(stack.to(GPU), None, *on_gpu)), wanted, f"{spec} stack"
    )


def test_experts_train():
    """The three products of a layer of experts: over rows, and over tokens, as on the CPU but for the order of sums."""
    torch.manual_seed(1)
    layer = fp4ext.Experts(5, 144, 32, policy="mxfp8")
    x, offsets = experts_data()
    results = []
    for device in ("cpu", GPU):
        layer = layer.to(device)
        inputs = x.to(device).float().requires_grad_()
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            y = layer(inputs, offsets.to(device))
        grads = torch.autograd.grad(y.float().square().sum(), [inputs, *layer.parameters()])
        results.append([t.detach().float().cpu() for t in (y, *grads)])
    for ours, cpu in zip(results[1], results[0], strict=True):
        assert (ours - cpu).abs().max() <= 0.02 * cpu.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype):
    """The CPU's bytes; a decode through a cache gives the rows of a prefill."""
    q, k, v = qkv(70, 300, dtype)
    start = torch.tensor([0, 230])
    for first in (None, start):
        on_gpu = [t.to(GPU) for t in (q, k, v)] + [None if first is None else first.to(GPU)]
        y = torch.ops.fp4ext.attention(*on_gpu, 0.5)
        assert_bytes_equal(y.cpu(), torch.ops.fp4ext.attention(q, k, v, first, 0.5), f"{dtype} {first}")
    token = torch.ops.fp4ext.attention(on_gpu[0][:, :, 9:10], *on_gpu[1:3], on_gpu[3] + 9, 0.5)
    assert torch.equal(token, y[:, :, 9:10])


def test_a_graph_of_experts_and_attention_replays():
    """Offsets, starts and RNG states are tensors: new ones, written between replays, give what eager code gives."""
    x, offsets = (t.to(GPU) for t in experts_data())
    rng, w = RNG.to(GPU), to_gpu(operand("nvfp4", 5, 32, 144, seed=8))
    q, k, v = (t.to(GPU) for t in qkv(1, 300))
    start = torch.zeros(2, dtype=torch.int64, device=GPU)
    key = "nvfp4/amax/stochastic/1x16/tensor/none"

    def step():
        rows = torch.ops.fp4ext.grouped_quantize(x, offsets, key, -1, rng, 0)
        cols = torch.ops.fp4ext.grouped_quantize(x, offsets, key, -2, rng, 0)
        y = torch.ops.fp4ext.grouped_gemm(*rows, "nvfp4", *w.parts, offsets, "float32", "invariant", "auto")
        dw = torch.ops.fp4ext.grouped_gemm(*cols, "nvfp4", *cols, "nvfp4", offsets, "float32", "invariant", "auto")
        return y, dw, torch.ops.fp4ext.attention(q, k, v, start, 0.5)

    step()  # the first product on a device tests its kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for i, ends in enumerate(([0, 5, 5, 128, 300], [310] * 5, [0, 0, 0, 0, 7])):
        offsets.copy_(torch.tensor(ends, dtype=torch.int32))
        start.fill_(100 * i)
        rng[1] = i
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, step(), strict=True)), ends


def test_nothing_waits_for_the_device():
    """No op reads anything back: torch would raise."""
    x, offsets = (t.to(GPU) for t in experts_data())
    q, w = fp4ext.quantize(x, "nvfp4"), fp4ext.quantize(x[:48], "nvfp4")
    key = KEYS[0]
    fp4ext.gemm(q, w)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fp4ext.quantize(x, "nvfp4", rounding="stochastic")
        fp4ext.gemm(q, w)
        fp4ext.gemm(q, w, accumulate="fast", backend="fast")
        for axis in (-1, -2):
            fp4ext.grouped_quantize(x, key, offsets, axis=axis, rng=RNG.to(GPU, non_blocking=True))
        q.dequantize()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_other_streams_and_devices():
    """Work goes to the current stream of the tensor's device, and the current device stays what it was."""
    x = torch.randn(512, 512, dtype=torch.bfloat16)
    wanted = torch.ops.fp4ext.quantize(x, KEYS[0], -1, None, 0, None)
    a, b = operand("nvfp4", 20, 128, seed=1, integers=True), operand("nvfp4", 24, 128, seed=2, integers=True)
    product = torch.ops.fp4ext.gemm(*a.parts, *b.parts, None, "float32", "invariant", "cpu")
    current = torch.cuda.current_device()
    for i in range(torch.cuda.device_count()):
        stream = torch.cuda.Stream(i)
        on_device = [type(o)(o.format, *(t.to(f"cuda:{i}") for t in (o.codes, o.scales, o.outer))) for o in (a, b)]
        torch.cuda.synchronize(i)
        y = gemm(*on_device)  # on a device that need not be the current one
        with torch.cuda.stream(stream):
            got = torch.ops.fp4ext.quantize(x.to(f"cuda:{i}", non_blocking=True), KEYS[0], -1, None, 0, None)
        stream.synchronize()
        assert_same_quantized(to_cpu(got), wanted, f"cuda:{i}")
        assert_bytes_equal(y.cpu(), product, f"cuda:{i}")
        assert torch.cuda.current_device() == current
    if torch.cuda.device_count() > 1:
        with pytest.raises(
            RuntimeError, match="w_codes is on CUDA device 1; accepted: CUDA device 0, where the input is"
        ):
            torch.ops.fp4ext.gemm(*to_gpu(a).parts, *on_device[1].parts, None, "float32", "invariant", "auto")


def test_sanitized_ops():
    """Each kernel once, ragged and unaligned: what `make test-gpu` runs under compute-sanitizer."""
    x, offsets = (t.to(GPU) for t in experts_data())
    narrow = x[:, :135].contiguous()
    for key in KEYS:
        for axis in (-1, -2):
            torch.ops.fp4ext.quantize(narrow, key, axis, RNG.to(GPU), 0, None)
            torch.ops.fp4ext.grouped_quantize(narrow, offsets, key, axis, RNG.to(GPU), 0)
        q = torch.ops.fp4ext.quantize_rowcol(x, key, key, RNG.to(GPU), SHARD.to(GPU), 1)
        torch.ops.fp4ext.requantize(*q[:3], key.split("/")[0], 144, KEYS[0], -2, None, 1)
    torch.ops.fp4ext.unswizzle(torch.ops.fp4ext.swizzle(q[1]), *q[1].shape)
    for x_format, w_format in PAIRS:
        for m, n, k in ((3, 17, 128), (130, 129, 80)):
            a, b = to_gpu(operand(x_format, m, k, seed=1)), to_gpu(operand(w_format, n, k, seed=2))
            gemm(a, b)
            gemm(a, b, backend="fast", accumulate="fast")
    for x_format, w_format in LANES:
        for m, n, k in ((3, 17, 128), (130, 129, 85)):
            gemm(to_gpu(operand(x_format, m, k, seed=1)), to_gpu(operand(w_format, n, k, seed=2)))
    a, b = to_gpu(operand("nvfp4", 310, 144, seed=1)), to_gpu(operand("nvfp4", 5, 17, 144, seed=2))
    torch.ops.fp4ext.grouped_gemm(*a.parts, *b.parts, offsets, "float32", "invariant", "auto")
    a = torch.ops.fp4ext.grouped_quantize(x, offsets, KEYS[0], -2, None, 0)
    torch.ops.fp4ext.grouped_gemm(*a, "nvfp4", *a, "nvfp4", offsets, "float32", "invariant", "auto")
    torch.ops.fp4ext.attention(*(t.to(GPU) for t in qkv(70, 300)), None, 0.5)
    torch.cuda.synchronize()
