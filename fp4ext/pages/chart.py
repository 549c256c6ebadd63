"""Line charts as inline SVG: no script, no network, colours from the page's CSS so that they follow light and dark."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from html import escape

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A curve. `hue` is N of the CSS variable --hue-N; a `faint` curve is drawn thin, behind the others."""

    name: str
    points: Points
    hue: int
    faint: bool = False


def chart(
    lines: list[Line],
    label: str,
    unit: str,
    width: int,
    height: int,
    top: float | None = None,
    zero: bool = False,
    across: str = "step",
    log: bool = False,
) -> str:
    """An SVG of that size in CSS pixels, which shrinks with its container.

    Args:
        lines: the curves; empty ones are left out.
        label: a description for screen readers.
        unit: the unit of the vertical axis.
        top: the end of the vertical axis, at which higher curves are cut; None: the largest value.
        zero: whether the vertical axis includes 0, with a line there.
        across: the quantity on the horizontal axis.
        log: whether both axes are logarithmic; points that are not above zero are then left out.
    """
    if log:
        lines = [replace(line, points=[(x, y) for x, y in line.points if x > 0 and y > 0]) for line in lines]
        lines = [replace(line, points=[(math.log10(x), math.log10(y)) for x, y in line.points]) for line in lines]
    text = power if log else number
    lines = [line for line in lines if line.points]
    values = [y for line in lines for _, y in line.points if top is None or y <= top]
    if not values:
        return f'<p class="empty">{escape(label)}: nothing to draw yet.</p>'
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    pad = 0.06 * (high - low) or 0.5
    low, high = low - pad, high + pad
    right = max(x for line in lines for x, _ in line.points) or 1
    x0, x1, y0, y1 = 52, width - 14, height - 40, 26

    def px(x: float) -> float:
        return round(x0 + (x1 - x0) * x / right, 1)

    def py(y: float) -> float:
        return round(y0 - (y0 - y1) * (y - low) / (high - low), 1)

    aria = escape(label, quote=True)
    out = [f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img" aria-label="{aria}">']
    for y in decades(low, high) if log else ticks(low, high, 6):
        kind = "zero" if zero and abs(y) < 1e-12 else "grid"
        out.append(f'<line class="{kind}" x1="{x0}" x2="{x1}" y1="{py(y)}" y2="{py(y)}"/>')
        out.append(f'<text x="{x0 - 8}" y="{py(y) + 4}" text-anchor="end">{text(y)}</text>')
    for x in decades(0, right) if log else ticks(0, right, max(3, width // 130)):
        out.append(f'<line class="tick" x1="{px(x)}" x2="{px(x)}" y1="{y0}" y2="{y0 + 5}"/>')
        out.append(f'<text x="{px(x)}" y="{y0 + 20}" text-anchor="middle">{text(x)}</text>')
    out.append(f'<line class="axis" x1="{x0}" x2="{x1}" y1="{y0}" y2="{y0}"/>')
    out.append(f'<text x="0" y="14">{escape(unit)}</text>')
    out.append(f'<text x="{x1}" y="{height - 4}" text-anchor="end">{escape(across)}</text>')
    box = f"{x0} {y1} {x1 - x0 + 4} {y0 - y1}"  # curves above `top` end at its edge
    out.append(f'<svg x="{x0}" y="{y1}" width="{x1 - x0 + 4}" height="{y0 - y1}" viewBox="{box}" overflow="hidden">')
    for line in sorted(lines, key=lambda line: not line.faint):
        path = " ".join(f"{px(x)},{py(y)}" for x, y in line.points)
        style = f"stroke:var(--hue-{line.hue})"
        if line.faint:
            out.append(f'<polyline class="faint" style="{style}" points="{path}"/>')
            continue
        out.append(f'<polyline class="curve" style="{style}" points="{path}"/>')
        for x, y in line.points if len(line.points) <= 40 else []:
            at, value = (f"{10**x:.4g}", 10**y) if log else (number(x), y)
            title = f"<title>{escape(line.name)}, {escape(across)} {at}: {value:.4g} {escape(unit)}</title>"
            out.append(f'<circle r="2.6" cx="{px(x)}" cy="{py(y)}" style="fill:var(--hue-{line.hue})">{title}</circle>')
    out.append("</svg></svg>")
    return "".join(out)


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 round numbers in [low, high], at a distance of 1, 2 or 5 · 10^n."""
    raw = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """The whole powers of ten in [low, high], given as exponents."""
    return [float(e) for e in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]


def power(exponent: float) -> str:
    """The text of a logarithmic tick: 100, 0.01, 1e−6."""
    return number(10**exponent) if abs(exponent) <= 3 else f"1e{number(exponent)}"


def number(value: float) -> str:
    """The text of a tick: 0, 250, 2.5, −10."""
    written = f"{value:.10g}"
    return written.replace("-", "−")
