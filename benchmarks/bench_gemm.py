"""GEMM throughput beside torch.mm in bf16 and fp32, ratios measured in the same run.

    python benchmarks/bench_gemm.py [--quick] [--threads 2] [--isa avx2]

Operands are quantized beforehand. A decode takes its weights in turn from enough copies that they come from memory, not
from the cache. Experts: the first product of a mixture of 64 experts, two active a token, tokens sorted by expert.
"""

from __future__ import annotations

import torch
from timing import best_times, parser, publish, show, write_rows

import fp4ext
from fp4ext.functional import ops

SHAPES = {
    "prefill": (512, 4096, 4096),
    "square": (2048, 2048, 2048),
    "decode": (1, 4096, 4096),
    "decode 16": (16, 4096, 4096),
}
QUICK = {
    "prefill": (128, 1024, 1024),
    "square": (512, 512, 512),
    "decode": (1, 2048, 2048),
    "decode 16": (16, 2048, 2048),
}
FORMATS = (
    ("nvfp4", "nvfp4"),
    ("mxfp4", "mxfp4"),
    ("mxfp8", "mxfp8"),
    ("bf16", "nvfp4"),
    ("bf16", "bf16"),
    ("fp32", "fp32"),
)
PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32}
EXPERTS, QUICK_EXPERTS = (64, 1024, 1024, 512), (8, 128, 128, 128)  # experts, rows of all, N, K
CACHE = 96 << 20  # bytes that no last-level cache holds


def operands(format: str, rows: int, k: int, copies: int = 1) -> list[tuple]:
    """(codes, scales, global_scale, format) of normal data, `copies` times."""
    x = torch.randn(rows, k)
    if format in PLAIN:
        return [(x.to(PLAIN[format], copy=True), None, None, format) for _ in range(copies)]
    codes, scales, global_scale = ops.quantize(x, fp4ext.Spec.parse(format).key)
    return [(codes.clone(), scales.clone(), global_scale, format) for _ in range(copies)]


def weights(format: str, name: str, n: int, k: int) -> list[tuple]:
    bits = 8 * PLAIN[format].itemsize if format in PLAIN else 8.25 if format == "mxfp8" else 4.5
    return operands(format, n, k, min(16, 2 + int(CACHE / (n * k * bits / 8))) if name.startswith("decode") else 1)


def in_turn(gemm, ws: list):
    """A function that runs gemm with the next copy of the weights at each call."""
    turn = iter(range(1 << 62))
    return lambda: gemm(ws[next(turn) % len(ws)])


def cases(name: str, m: int, n: int, k: int) -> dict:
    out = {}
    for format in PLAIN:
        x = operands(format, m, k)[0][0]
        out[f"torch.mm {format}"] = in_turn(lambda w, x=x: torch.mm(x, w[0].t()), weights(format, name, n, k))
    for x_format, w_format in FORMATS:
        x = operands(x_format, m, k)[0]
        label = x_format if x_format == w_format else f"{x_format} × {w_format}"
        out[label] = in_turn(lambda w, x=x: ops.gemm(x, w, None, "bfloat16"), weights(w_format, name, n, k))
    return out


def expert_cases(experts: int, m: int, n: int, k: int) -> dict:
    """One grouped product, beside torch's grouped and looped ones."""
    offsets = torch.randint(experts, (m,)).bincount(minlength=experts).cumsum(0).to(torch.int32)
    ends = offsets.tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    out = {}
    for format, dtype in PLAIN.items():
        x, w = torch.randn(m, k).to(dtype), torch.randn(experts, n, k).to(dtype)
        loop = lambda x=x, w=w: [torch.mm(x[a:b], w[e].t()) for e, (a, b) in enumerate(spans)]  # noqa: E731
        out[f"torch.mm {format}"] = loop
        if format == "bf16":
            out["torch grouped_mm bf16"] = lambda x=x, w=w: torch.nn.functional.grouped_mm(x, w.mT, offs=offsets)
    for x_format, w_format in FORMATS:
        x = torch.randn(m, k).to(PLAIN[x_format]) if x_format in PLAIN else torch.randn(m, k)
        w = torch.randn(experts, n, k).to(PLAIN[w_format]) if w_format in PLAIN else torch.randn(experts, n, k)
        x = x if x_format in PLAIN else fp4ext.grouped_quantize(x, x_format, offsets)
        w = w if w_format in PLAIN else fp4ext.grouped_quantize(w, w_format)
        label = x_format if x_format == w_format else f"{x_format} × {w_format}"
        out[label] = lambda x=x, w=w: fp4ext.grouped_gemm(x, w, offsets)
    return out


def main() -> None:
    p = parser(__doc__.splitlines()[0])
    p.add_argument("--quick", action="store_true", help="small shapes, for a look")
    p.add_argument("--isa", choices=fp4ext._C.isas(), default=fp4ext._C.isa(), help="default: the best")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    fp4ext._C.force_isa(args.isa)

    rows, cells = [], []
    shapes = QUICK if args.quick else SHAPES
    experts, *grouped = QUICK_EXPERTS if args.quick else EXPERTS
    for name, (m, n, k) in (*shapes.items(), (f"{experts} experts", grouped)):
        runs = expert_cases(experts, m, n, k) if name.endswith("experts") else cases(name, m, n, k)
        times = best_times(runs, args.repeats * (5 if name.startswith("decode") else 1))
        for label, seconds in times.items():
            row = {
                "shape": name,
                "m": m,
                "n": n,
                "k": k,
                "formats": label,
                "isa": args.isa,
                "threads": args.threads,
                "seconds": seconds,
                "gflops": 2e-9 * m * n * k / seconds,
                "vs_torch_bf16": times["torch.mm bf16"] / seconds,
                "vs_torch_fp32": times["torch.mm fp32"] / seconds,
            }
            rows.append(row)
            ratios = f"{row['vs_torch_bf16']:.2f}", f"{row['vs_torch_fp32']:.2f}"
            shape = f"{name}, {m}×{n}×{k}" if name.endswith("experts") else f"{m}×{n}×{k}"
            cells.append([f"{shape}, {label}", f"{seconds * 1e3:.3f}", f"{row['gflops']:.1f}", *ratios])
    columns = ["M×N×K, formats", "ms", "GFLOP/s", "× torch bf16", "× torch fp32"]
    text = show("GEMM, operands quantized beforehand", columns, cells)
    print("rows:", write_rows("gemm", rows))
    if args.docs:
        print("docs:", publish("gemm", [text]))


if __name__ == "__main__":
    main()
