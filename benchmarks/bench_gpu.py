"""Measures a CUDA device: quantize in GB/s and as a share of copy bandwidth, GEMMs and a training step against bf16.

Rows go to bench_out/gpu.jsonl with the device's name; a short table comes last. `make bench-gpu`.
Times are the median of 20 runs between CUDA events, after 5 that warm up; the inputs are larger than any L2.
"""

import itertools
import json
import statistics
from pathlib import Path

import torch
from torch import nn

import fp4ext

OUT = Path("bench_out/gpu.jsonl")
# What fp4ext aims at on an H200, as a share of copy bandwidth or as a multiple of torch's bf16.
TARGETS = {
    ("row", ""): 0.80,
    ("rowcol", ""): 0.75,
    ("row SR", ""): 0.65,
    ("gemm 8192", "emulated"): 0.50,
    ("gemm 8192", "fast"): 0.85,
    ("decode 1", "emulated"): 3.0,
}
VARIANT = ("fast", "cublas")


def seconds(f) -> float:
    for _ in range(5):
        f()
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def quantizers(n: int, device: str):
    """(name, bytes moved, function). Bytes: x read, codes and scales written, and x again for its amax."""
    x, rng = torch.randn(n, n, device=device, dtype=torch.bfloat16), torch.tensor([1, 2], device=device)
    amax = x.abs().max().float()
    key = "nvfp4/amax/{}/1x16/tensor/{}".format
    ops = torch.ops.fp4ext
    y = torch.empty_like(x)
    yield "copy", 4 * n * n, lambda: y.copy_(x)
    yield "amax", 2 * n * n, lambda: ops.amax(x, key("nearest", "none"), -1, None)
    one = 2.5625 * n * n
    yield "row", one, lambda: ops.quantize(x, key("nearest", "none"), -1, None, 0, amax)
    yield "row SR", one, lambda: ops.quantize(x, key("stochastic", "none"), -1, rng, 0, amax)
    sweep = "nvfp4/sweep/nearest/1x16/tensor/none"
    yield "row sweep", one, lambda: ops.quantize(x, sweep, -1, None, 0, amax)
    yield "row RHT 16", one, lambda: ops.quantize(x, key("nearest", "16"), -1, rng, 0, amax)
    eden = "nvfp4/sweep/eden/1x16/tensor/128x2"
    yield "row eden 128x2", one, lambda: ops.quantize(x, eden, -1, rng, 0, amax)
    nearest = key("nearest", "none")
    yield "rowcol", 5.125 * n * n, lambda: ops.quantize_rowcol(x, nearest, nearest, None, None, 0)
    yield "row mxfp8", 3.03125 * n * n, lambda: ops.quantize(x, "mxfp8/ceil/nearest/1x32/none/none", -1, None, 0, None)


def products(sizes, backends, device: str):
    """(name, backend, multiplications, function, torch's) of NVFP4·NVFP4, and of a bf16 decode with NVFP4 weights."""
    for m, n in sizes:
        x, w = (torch.randn(rows, n, device=device, dtype=torch.bfloat16) for rows in (m, n))
        xq, wq = fp4ext.quantize(x, "nvfp4"), fp4ext.quantize(w, "nvfp4")
        theirs = lambda x=x, w=w: x @ w.T  # noqa: E731
        for backend in backends:
            how = {"accumulate": "fast" if backend in VARIANT else "invariant", "backend": backend}
            if m == n or backend not in VARIANT:
                name = f"gemm {n}" if m == n else f"decode {m}"
                yield name, backend, m * n * n, lambda xq=xq, wq=wq, how=how: fp4ext.gemm(xq, wq, **how), theirs
        if m != n:
            yield f"decode {m} bf16", backends[0], m * n * n, lambda x=x, wq=wq: fp4ext.gemm(x, wq), theirs


def steps(tokens: int, n: int, policies, device: str):
    """(name, policy, multiplications, function, torch's): forward and backward of a layer, quantization included."""
    x = torch.randn(tokens, n, device=device, dtype=torch.bfloat16, requires_grad=True)

    def forward_backward(layer):
        layer = layer.to(device, torch.bfloat16)
        return lambda: torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])

    theirs = forward_backward(nn.Linear(n, n, bias=False))
    for policy in policies:
        layer = fp4ext.Linear(n, n, bias=False, policy=policy)
        yield f"step {tokens}×{n}", policy, 3 * tokens * n * n, forward_backward(layer), theirs


def main():
    assert torch.cuda.is_available(), "torch finds no CUDA device"
    device = torch.cuda.get_device_name()
    rows = []
    for name, line in fp4ext.backends().items():
        print(f"{name}: {line}")
    copy = None
    for name, moved, f in quantizers(8192, "cuda"):
        speed = moved / seconds(f) / 1e9
        copy = copy or speed
        rows.append({"name": name, "by": "", "GB/s": round(speed), "of copy": round(speed / copy, 3)})
    available = [b for b in ("emulated", *VARIANT, "native") if fp4ext.backends()[b].startswith("available")]
    gemms = products([(8192, 8192), (4096, 4096), (1, 8192), (16, 8192)], available, "cuda")
    layers = steps(8192, 4096, ("mxfp8", "nvidia", "end_to_end"), "cuda")
    for name, by, work, ours, theirs in itertools.chain(gemms, layers):
        t, bf16 = seconds(ours), seconds(theirs)
        speed = 2 * work / t / 1e12
        rows.append({"name": name, "by": by, "TFLOP/s": round(speed, 1), "of bf16": round(bf16 / t, 3)})
    OUT.parent.mkdir(exist_ok=True)
    with OUT.open("a") as file:
        for row in rows:
            file.write(json.dumps({"device": device, "torch": torch.__version__, **row}) + "\n")
    print(f"\n{device}, torch {torch.__version__}: rows in {OUT}")
    for row in rows:
        unit, base = ("GB/s", "copy") if "GB/s" in row else ("TFLOP/s", "bf16")
        aim = TARGETS.get((row["name"], row["by"]))
        line = f"  {row['name']:<16} {row['by']:<11} {row[unit]:>8} {unit:<8} {row['of ' + base]:>6} of {base}"
        print(line + (f"   aim {aim}" if aim else ""))


if __name__ == "__main__":
    main()
