"""How the benchmarks measure: interleaved repetitions, the best of each, ratios in one run; rows that say on what."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fp4ext

OUT = Path("bench_out")


def device_name() -> str:
    """The CPU's model, its instruction set in use and the threads."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {fp4ext.backends()['cpu'].split(':')[1].split(',')[0].strip()}, {torch.get_num_threads()} threads"


def best_times(cases: dict[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """Seconds of the fastest of `repeats` calls of each case. They take turns: a slow moment hits all of them."""
    best = dict.fromkeys(cases, float("inf"))
    for run in cases.values():
        run()
    for _ in range(repeats):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def write_rows(name: str, rows: list[dict]) -> Path:
    """Appends rows to bench_out/<name>.jsonl, each with the device, torch's version and the time."""
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.jsonl"
    common = {"device": device_name(), "torch": torch.__version__, "time": time.strftime("%Y-%m-%dT%H:%M:%S")}
    with path.open("a") as f:
        for row in rows:
            f.write(json.dumps(common | row) + "\n")
    return path


def parser(description: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads (default: all cores)")
    p.add_argument("--repeats", type=int, default=7, help="calls of each case; the fastest counts (default 7)")
    return p
