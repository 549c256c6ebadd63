"""How the benchmarks measure: interleaved repetitions, the best of each, ratios in one run; rows that say on what."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import fp4ext

OUT = Path("bench_out")
DOCS = Path(__file__).resolve().parents[1] / "docs" / "measured"


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
    """Seconds of the fastest of `repeats` calls of each case. They take turns: a slow moment hits all of them.

    What takes less than 20 ms is called three times a turn, or it would pay for what its neighbour left behind: a
    decode of 660 µs takes 200 more behind a product of torch's in fp32.
    """
    best = dict.fromkeys(cases, float("inf"))

    def call(name: str) -> None:
        start = time.perf_counter()
        cases[name]()
        best[name] = min(best[name], time.perf_counter() - start)

    for _ in range(repeats + 1):  # the first time is to warm up
        for name in cases:
            call(name)
            for _ in range(2 if best[name] < 0.02 else 0):
                call(name)
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


def show(title: str, columns: list[str], rows: list[list[str]]) -> str:
    """Prints a table, its first column of names; returns it as Markdown."""
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return f"{title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def publish(name: str, blocks: list[str]) -> Path:
    """Writes docs/measured/<name>.md: the tables, the command that made them and the device they are of."""
    DOCS.mkdir(exist_ok=True)
    path = DOCS / f"{name}.md"
    command = f"`python benchmarks/bench_{name}.py --docs`"
    head = f"# Measured: {name}\n\nWritten by {command} on {device_name()}, torch {torch.__version__}, "
    head += time.strftime("%Y-%m-%d") + ".\n"
    path.write_text("\n".join([head, *blocks]))
    return path


def parser(description: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads (default: all cores)")
    p.add_argument("--docs", action="store_true", help="write the tables to docs/measured/ too")
    p.add_argument("--repeats", type=int, default=7, help="calls of a case, the fastest counts (default %(default)s)")
    return p
