"""report.html: one file that tells what a run was and what it found. It loads nothing, so it can be kept and sent.

Where matplotlib is installed, also loss.png: the curves that a job's View names, for places that show pictures.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from fp4ext.pages.chart import Line, chart
from fp4ext.pages.page import figure, page, pairs, soft, table

from . import disk
from .directory import read_config, read_metrics
from .view import Curve, Metrics, View


def write(view: View, out: Path, result) -> None:
    """Write report.html (and loss.png) into the run directory."""
    config, metrics = read_config(out), read_metrics(out)
    disk.replace(out / "report.html", render(view, config, metrics, result).encode())
    if view.picture:
        _picture(out / "loss.png", view, config["run"], metrics, _names(view, result))


def render(view: View, config: dict, metrics: Metrics, result) -> str:
    """The page."""
    title, left = view.title(config), view.left(result)
    run = {key: value for key, value in config["run"].items() if key not in ("policies", "arms") and value is not None}
    data = {key: value for key, value in config["data"].items() if key != "paths"}
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(view.summary(result))}</p>",
        soft(view.said(config)),
        *sections(view, config, metrics, result),
        *(["<h2>What is not quantized</h2>", pairs(left)] if left else []),
        "<h2>To repeat it</h2>",
        f"<pre>{escape(config['command'])}</pre>",
        "<h2>Configuration</h2>",
        pairs(flat(run)),
        "<h2>Data and versions</h2>",
        pairs(flat({"data": data, **config["facts"]})),
    ]
    return page(title, parts)


def sections(view: View, config: dict, metrics: Metrics, result, level: int = 2) -> list[str]:
    """The table and the curves, under headings of that level."""
    names = _names(view, result)
    columns = [column for column in view.columns if column.there(result)]
    rows = [[column.cell(row) for column in columns] for row in result.rows]
    dots = [_hue(name, names) for name in names]
    parts = [
        f"<h{level}>Result</h{level}>",
        table([(column.name, column.unit) for column in columns], rows, dots),
        soft(view.about),
    ]
    for curve in view.curves:
        lines = _lines(curve, view, config["run"], metrics, names)
        if not lines:
            continue
        top = _top(lines) if curve.late else None
        sizes = ((940, 340), (360, 290))
        wide, narrow = (chart(lines, curve.label, curve.unit, w, h, top, curve.zero) for w, h in sizes)
        shown = {line.name for line in lines}
        parts += [
            *([f"<h{level}>{escape(curve.heading)}</h{level}>"] if curve.heading else []),
            soft(f"{curve.label}, {curve.unit}"),
            figure((wide, narrow), [(_hue(name, names), name) for name in names if name in shown]),
            *([soft(curve.remark)] if curve.remark else []),
        ]
    return parts


def flat(values: dict, prefix: str = "") -> dict:
    """{"a": {"b": 1}} → {"a.b": 1}."""
    found = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _names(view: View, result) -> list[str]:
    return [getattr(row, view.key) for row in result.rows]


def _hue(name: str, names: list[str]) -> int:
    """bf16 is drawn in the ink's colour, the others in turn."""
    others = [other for other in names if other != "bf16"]
    return 0 if name == "bf16" else 1 + others.index(name) % 7


def _lines(curve: Curve, view: View, run: dict, metrics: Metrics, names: list[str]) -> list[Line]:
    """The curves of all arms; none where no arm has a point."""
    of = {name: [line for line in metrics if line[view.key] == name] for name in names}
    lines = []
    for name in names:
        drawn = curve.draw(of[name], of.get("bf16"), run)
        lines += [Line(name, points, _hue(name, names), faint=points is not drawn[-1]) for points in drawn if points]
    return lines


def _top(lines: list[Line]) -> float | None:
    """The value below which all of the run but its first tenth lies."""
    points = [point for line in lines for point in line.points]
    last = max((x for x, _ in points), default=0)
    return max((y for x, y in points if 10 * x >= last), default=None)


def _picture(path: Path, view: View, run: dict, metrics: Metrics, names: list[str]) -> None:
    try:
        import matplotlib
    except ImportError:  # optional; the report has the curves
        return
    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    for axis, curve in zip(drawing.subplots(1, len(view.picture)), view.picture, strict=True):
        lines = _lines(curve, view, run, metrics, names)
        for line in lines:
            strong = {"marker": "o", "markersize": 3, "label": line.name}
            style = {"alpha": 0.3, "linewidth": 0.8} if line.faint else strong
            colour = "black" if line.hue == 0 else f"C{line.hue - 1}"
            axis.plot([x for x, _ in line.points], [y for _, y in line.points], color=colour, **style)
        top = _top(lines) if curve.late else None
        if top is not None and math.isfinite(top):
            axis.set_ylim(top=1.02 * top)
        if curve.zero:
            axis.axhline(0, color="black", linewidth=0.8, linestyle="--")
        axis.set(xlabel="step", ylabel=f"{curve.label}, {curve.unit}")
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
    aside = path.with_name(f".{path.name}.writing")
    drawing.savefig(aside, format="png")
    aside.rename(path)
