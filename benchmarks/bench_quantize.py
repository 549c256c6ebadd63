"""Quantizers at memory speed: elements a second, share of a plain copy's bandwidth, ratios to peers in one run.

    python benchmarks/bench_quantize.py [--size 4096] [--threads 2] [--no-peers]

Bandwidth counts the bytes that must move, 2 in (bf16) and 0.5625 out an element (NVFP4), and not the second read that
the amax pass costs.
"""

from __future__ import annotations

import torch
from timing import best_times, parser, publish, show, write_rows

from fp4ext import Spec
from fp4ext.functional import ops

RNG = torch.tensor([1, 2])
CASES = {
    "amax": "nvfp4/amax",
    "amax, columns": "nvfp4/amax",
    "amax, rows + columns": "nvfp4/amax",
    "amax 16x16": "nvfp4/amax/nearest/16x16",
    "four_over_six": "nvfp4/four_over_six",
    "sweep": "nvfp4/sweep",
    "SR amax": "nvfp4/amax/stochastic",
    "SR minvar": "nvfp4/minvar/stochastic",
    "amax, RHT16": "nvfp4/amax/nearest/1x16/tensor/16",
    "eden amax 128": "nvfp4/amax/eden/1x16/tensor/128",
    "eden sweep 128x2": "nvfp4/sweep/eden/1x16/tensor/128x2",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
}


def peers(x: torch.Tensor) -> dict:
    """torchao's quantizers, compiled, where torchao is installed."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    except ImportError as error:
        print(f"no torchao to compare with: {error}")
        return {}

    @torch.compile
    def nvfp4(x):
        return nvfp4_quantize(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax()))

    @torch.compile
    def mxfp8(x):
        return to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)

    return {"torchao nvfp4, compiled": lambda: nvfp4(x), "torchao mxfp8, compiled": lambda: mxfp8(x)}


def main() -> None:
    p = parser(__doc__.splitlines()[0])
    p.add_argument("--size", type=int, default=4096, help="rows and columns (default 4096)")
    p.add_argument("--no-peers", action="store_true", help="leave torchao out (it compiles for a minute)")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    x = torch.randn(args.size, args.size).bfloat16()
    into = torch.empty_like(x)

    def case(name: str):
        key = Spec.parse(CASES[name]).key
        if "rows + columns" in name:
            return lambda: ops.quantize_rowcol(x, key, key, RNG, RNG)
        return lambda: ops.quantize(x, key, -2 if "columns" in name else -1, RNG)

    runs = {"copy": lambda: into.copy_(x)} | {name: case(name) for name in CASES}
    if not args.no_peers:
        runs |= peers(x)
    times = best_times(runs, args.repeats)

    copy_bandwidth = 4 * x.numel() / times["copy"]
    cells = []
    rows = []
    for name, seconds in times.items():
        if name == "copy":
            continue
        bits = 8.25 if "mxfp8" in name else 4.25 if "mxfp4" in name else 4.5
        copies = 2 if "rows + columns" in name else 1
        bandwidth = x.numel() * (2 + copies * bits / 8) / seconds
        peer = times.get("torchao mxfp8, compiled" if "mxfp8" in name else "torchao nvfp4, compiled")
        row = {
            "rule": name,
            "shape": list(x.shape),
            "elements_per_s": x.numel() / seconds,
            "bytes_per_s": bandwidth,
            "share_of_copy": bandwidth / copy_bandwidth,
            "time_over_amax": seconds / times["amax"],
            "times_torchao": peer / seconds if peer else None,
        }
        rows.append(row)
        cells.append(
            [
                name,
                f"{row['elements_per_s'] / 1e6:.0f}",
                f"{bandwidth / 1e9:.2f}",
                f"{row['share_of_copy']:.0%}",
                f"{row['time_over_amax']:.2f}",
                f"{row['times_torchao']:.1f}" if peer else "–",
            ]
        )
    columns = ["rule", "M elements/s", "GB/s", "of copy", "time / amax", "× torchao"]
    text = show(
        f"Quantizing {args.size}², bf16 in; a plain copy runs at {copy_bandwidth / 1e9:.1f} GB/s", columns, cells
    )
    print("rows:", write_rows("quantize", rows))
    if args.docs:
        print("docs:", publish("quantize", [text]))


if __name__ == "__main__":
    main()
