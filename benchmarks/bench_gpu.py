"""Measures a CUDA device: quantize in GB/s and as a share of copy bandwidth, GEMMs against torch's bf16.

Rows go to bench_out/gpu.jsonl with the device's name; a short table comes last. `make bench-gpu`.
Times are the median of 20 runs between CUDA events, after 5 that warm up; the inputs are larger than any L2.
"""

import json
import statistics
from pathlib import Path

import torch

import fp4ext

OUT = Path("bench_out/gpu.jsonl")
RNG = torch.tensor([1, 2])
# What fp4ext aims at on an H200, as a share of copy bandwidth or as a multiple of torch's bf16.
TARGETS = {"row": 0.80, "rowcol": 0.75, "row SR": 0.65, "gemm 8192": 0.50, "decode 1": 3.0}


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


def quantizers(n: int):
    """(name, bytes moved, function). Bytes: x read, codes and scales written, and x again for its amax."""
    x, rng = torch.randn(n, n, device="cuda", dtype=torch.bfloat16), RNG.cuda()
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


def products(backends):
    """(name, multiplications, function, torch's)."""
    for m, n in ((8192, 8192), (4096, 4096), (1, 8192), (16, 8192)):
        x, w = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        xq, wq = fp4ext.quantize(x, "nvfp4"), fp4ext.quantize(w, "nvfp4")
        for backend in backends:
            name = f"gemm {n}" if m == n else f"decode {m}"
            yield (
                name,
                backend,
                m * n * n,
                lambda xq=xq, wq=wq, b=backend: fp4ext.gemm(xq, wq, backend=b),
                lambda x=x, w=w: x @ w.T,
            )


def main():
    assert torch.cuda.is_available(), "torch finds no CUDA device"
    device = torch.cuda.get_device_name()
    rows = []
    for name, line in fp4ext.backends().items():
        print(f"{name}: {line}")
    copy = None
    for name, moved, f in quantizers(8192):
        speed = moved / seconds(f) / 1e9
        copy = copy or speed
        rows.append({"name": name, "GB/s": round(speed), "of copy": round(speed / copy, 3)})
    available = [b for b in ("emulated", "native") if fp4ext.backends()[b].startswith("available")]
    for name, backend, work, ours, theirs in products(available):
        t, bf16 = seconds(ours), seconds(theirs)
        row = {
            "name": name,
            "backend": backend,
            "TFLOP/s": round(2 * work / t / 1e12, 1),
            "of bf16": round(bf16 / t, 3),
        }
        rows.append(row)
    OUT.parent.mkdir(exist_ok=True)
    with OUT.open("a") as file:
        for row in rows:
            file.write(json.dumps({"device": device, "torch": torch.__version__, **row}) + "\n")
    print(f"\n{device}, torch {torch.__version__}: rows in {OUT}")
    for row in rows:
        share = row.get("of copy", row.get("of bf16"))
        aim = TARGETS.get(row["name"])
        what = f"{row.get('GB/s', row.get('TFLOP/s')):>8} {'GB/s' if 'GB/s' in row else 'TFLOP/s'}"
        of = "copy" if "of copy" in row else "bf16"
        print(
            f"  {row['name']:<16} {row.get('backend', ''):<9} {what:<17} {share:>6} of {of}"
            + (f"   aim {aim}" if aim else "")
        )


if __name__ == "__main__":
    main()
