"""Audit, cost and advice as text on a console."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.table import Table

from .advice import Advice
from .cost_model import Cost
from .html import mean, summary
from .report import Report


def print_report(report: Report, console: Console, most: int = 12) -> None:
    """Print the means over layers for each policy, then at most `most` groups of faults."""
    console.print(summary(report), highlight=False)
    grid = _grid(
        "policy", "operand", "error\n×1e-3", "signed\n×1e-3", "noise\n×1e-3", "floor\n×1e-3", "SNR\ndB", "‖g‖/‖n‖"
    )
    for policy in report.policies:
        rows = report.rows[policy]
        for gemm, what in dict.fromkeys((r.gemm, r.what) for r in rows):
            mine = [r for r in rows if (r.gemm, r.what) == (gemm, what)]
            m = [r.measured for r in mine]
            mse, floor = mean(x.mse for x in m), mean(x.law.floor.mean for x in m)
            ratio = min((x.snr_ratio for x in m), default=math.inf) if what == "dw" else math.inf
            numbers = [f"{1e3 * mse:.3f}", f"{1e3 * mean(x.signed.mean for x in m):+.2f}"]
            numbers += [
                f"{1e3 * mean(x.law.variance for x in m):.3f}",
                f"{'[red]' if any(r.drifts for r in mine) else ''}{1e3 * floor:.3f}",
            ]
            numbers += [
                f"{-10 * math.log10(mse):.1f}" if mse > 0 else "exact",
                f"{ratio:.1f}" if ratio < math.inf else "",
            ]
            grid.add_row(policy, f"{gemm} {what}", *numbers)
        grid.add_section()
    console.print(grid)
    groups = report.grouped
    for group in groups[:most]:
        f = group[0]
        where = f"{f.module} and {len(group) - 1} more" if len(group) > 1 else f.module
        console.print(f"[red]{f.kind}[/] {f.policy}: {where}, {f.gemm} {f.what}: {f.text}")
    if len(groups) > most:
        console.print(f"… and {len(groups) - most} more, in the report")


def print_advice(advice: Advice, console: Console) -> None:
    """Print the ranking of each stage."""
    for which, scores in advice.ranked.items():
        grid = _grid(
            f"{which}, best on {advice.goal} first", "error\n×1e-3", "floor\n×1e-3", "faulty\nlayers", "ns/token", "bit"
        )
        for s in scores:
            faults = f"[red]{len(s.faults)}" if s.faults else "0"
            grid.add_row(
                s.name, f"{1e3 * s.error:.3f}", f"{1e3 * s.drift:.3f}", faults, f"{1e9 * s.seconds:.3g}", f"{s.bits:g}"
            )
        console.print(grid)


def print_cost(cost: Cost, console: Console, tokens: float | None = None) -> None:
    """Print the terms of a step, the memory of a chip, and the time of a run over `tokens`, if given."""
    head = f"{cost.shape.name}: {amount(cost.shape.parameters)} parameters, policy {cost.policy}"
    console.print(f"{head}, {cost.gpus} × {cost.machine}, {amount(cost.tokens)} tokens per step", highlight=False)
    grid = _grid("term", "ms", "share", "PFLOP", "GB moved", "bound by")
    for t in cost.terms:
        share = t.seconds / cost.seconds
        grid.add_row(
            t.name,
            f"{1e3 * t.seconds:.3g}",
            f"{share:.1%}",
            f"{t.operations / 1e15:.3g}",
            f"{t.bytes / 1e9:.3g}",
            t.binds,
        )
    if cost.exchange:
        share = cost.exchange.seconds / cost.seconds
        grid.add_row(
            "exchange (overlaps)",
            f"{1e3 * cost.exchange.seconds:.3g}",
            f"{share:.1%}",
            "",
            f"{cost.exchange.bytes / 1e9:.3g}",
            "link",
        )
    console.print(grid)
    binds = cost.binds
    console.print(
        f"a step: {1e3 * cost.seconds:.3g} ms; binding: {binds.name} ({binds.binds}); quantizers {cost.overhead:.1%}; "
        f"arithmetic intensity {cost.intensity:.0f} FLOP/B; {amount(cost.tokens / cost.seconds)} tokens/s",
        highlight=False,
    )
    if tokens:
        seconds = cost.run_seconds(tokens)
        days = f"{seconds / 86400:.3g} days" if seconds >= 86400 else f"{seconds / 3600:.3g} hours"
        hours = cost.gpus * seconds / 3600
        console.print(f"{amount(tokens)} tokens: {days}, {amount(hours)} chip hours", highlight=False)
    held = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in cost.memory.items())
    total = sum(cost.memory.values())
    over = "" if total <= cost.room else ": [red]does not fit[/]"
    console.print(f"memory per chip, GB: {held}; {total / 1e9:.3g} of {cost.room / 1e9:.0f}{over}", highlight=False)


def amount(value: float) -> str:
    """1.5e9 as 1.5 G."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _grid(*headings: str) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        right = i and heading not in ("operand", "bound by")
        grid.add_column(heading, justify="right" if right else "left")
    return grid
