"""report.html of an audit: one file without external resources, in the style of fp4ext.pages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from ..nn.noise import SQRT3
from ..pages.chart import Line, Points, chart
from ..pages.page import Cell, figure, page, pairs, soft, table
from .advice import Advice
from .averaging import Interval, ratio_of
from .layer import PRODUCTS, Row
from .operand import Measured
from .report import Report

SIZES = (940, 380), (360, 300)  # of the wide and of the narrow chart, pixels

ABOUT_CURVES = (
    "Relative error of the mean of B draws of dx and dw, averaged over layers. Points are measured; faint lines are "
    "the fit variance/B + floor. Noise falls as 1/B, and drift remains. Rounding that is not random has one point, "
    "since its whole error remains."
)
ABOUT_ROWS = (
    "Error: E‖q−x‖²/‖x‖² of one draw q of x. Signed: Σ(q−x)·sign(x)/Σ|x|, with its 95 % interval over draws (exact "
    "where nothing is random). Misaligned: 1−E⟨q,x⟩/‖x‖². Noise and floor: the fit of the averaging law. Ratio: "
    "B·err(B)/err(1) at B = 256: 1 without drift, 256 if the whole error is drift. Reference: the operand to which the "
    "mean is closer, plain or as the forward quantized it (hat)."
)


def render(report: Report, title: str = "Audit", command: str = "", advice: Advice | None = None) -> str:
    """The page as HTML.

    Args:
        command: the command that repeats the audit, if any.
        advice: a proposal to show on the page.
    """
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(summary(report))}</p>"]
    parts += [soft("Click a heading to sort by its column."), "<h2>Faults</h2>", _faults(report)]
    parts += ["<h2>Noise and drift of the gradients</h2>", _curves(report), soft(ABOUT_CURVES)]
    parts += ["<h2>Policies</h2>", _policies(report)]
    parts += ["<h2>Operands and products</h2>", soft(ABOUT_ROWS)]
    for policy in report.policies:
        parts.append(f"<h3>{escape(policy)}, mean over layers</h3>{_means(report.rows[policy])}")
        whole = _rows(report.rows[policy])
        parts.append(f"<details><summary>{escape(policy)}, every layer</summary>{whole}</details>")
    parts += ["<h2>Scale bytes</h2>", _histograms(report)]
    parts += [soft("Share of blocks by scale byte (E4M3 codes 0–126 for NVFP4, E8M0 exponents for MX), all layers.")]
    parts += ["<h2>Layers</h2>", _layers(report)]
    parts += [
        soft("‖g‖/‖noise‖ of the weight gradient while all layers round; below √3 = 1.73 the gradient no longer helps.")
    ]
    parts += ["<h2>Largest gradients</h2>", _amax(report), soft("Largest |dy| of each batch, relative to the first's.")]
    if advice:
        parts += _advice(advice)
    left = {f"{policy}: {name}": why for policy, names in report.left.items() for name, why in names.items()}
    if left:
        parts += ["<h2>Modules in BF16</h2>", pairs(left)]
    parts += [f"<h2>Command</h2><pre>{escape(command)}</pre>"] if command else []
    return page(title, [*parts, "<h2>Settings</h2>", pairs(report.facts)])


def summary(report: Report) -> str:
    """The losses and the number of faults, in a sentence or two."""
    base = report.losses.get("bf16")
    gaps = ", ".join(f"{p}\u00a0{1e3 * (report.losses[p] - base):+.1f}" for p in report.policies if base is not None)
    said = f"{len(report.layers)} layers. Loss on these batches, less that of bf16 ({base:.4f}): {gaps} mnat. "
    faults = report.faults
    if not faults:
        return said + "No drift, saturation, underflow or drowned gradient was found."
    kinds = {kind: sum(f.kind == kind for f in faults) for kind in dict.fromkeys(f.kind for f in faults)}
    places = len({f.module for f in faults})
    listed = ", ".join(f"{n} × {kind}" for kind, n in kinds.items())
    return said + f"{len(faults)} faults in {places} {'layer' if places == 1 else 'layers'}: {listed}."


def _faults(report: Report) -> str:
    faults = report.faults
    if not faults:
        return soft("None.")
    headings = [("layer", ""), ("policy", ""), ("place", ""), ("kind", ""), ("size", ""), ("finding", "")]
    rows: list[list[Cell]] = []
    for group in report.grouped:
        f = group[0]
        others = f" and {len(group) - 1} more" if len(group) > 1 else ""
        where = f"all {len(group)} layers" if len(group) == len(report.layers) > 1 else f.module + others
        kind = (f.kind, _rank(f.kind), True)
        rows.append([where, f.policy, f"{f.gemm}, {f.what}", kind, (f"{f.size:.2g}", f.size), f.text])
    return table(headings, rows) + (soft("Sizes and findings are those of the worst layer.") if faults else "")


def _rank(kind: str) -> int:
    return ("non-finite", "drift", "saturation", "underflow", "noise").index(kind)


def _gradients(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.what in ("dx", "dw")]


def _curves(report: Report) -> str:
    lines = []
    for hue, policy in enumerate(report.policies, 1):
        made = [row.measured.law for row in _gradients(report.rows[policy])]
        if not made:
            continue
        sizes = [b for b, _ in made[0].curve]
        measured: Points = [(b, mean(law.curve[i][1] for law in made)) for i, b in enumerate(sizes)]
        fitted: Points = [(2**i, mean(law.err(2**i) for law in made)) for i in range(9)]
        lines += [Line(f"{policy}, fit", fitted, _hue(hue), faint=True), Line(policy, measured, _hue(hue))]
    legend = [(_hue(hue), policy) for hue, policy in enumerate(report.policies, 1)]
    return _figure(lines, "Error of the mean of B draws", "relative error", legend, "draws averaged, B", log=True)


def _figure(
    lines: list[Line], label: str, unit: str, legend: list[tuple[int, str]], across: str, **options: bool
) -> str:
    wide, narrow = (chart(lines, label, unit, w, h, across=across, **options) for w, h in SIZES)
    return figure((wide, narrow), legend)


def _policies(report: Report) -> str:
    headings = [("policy", ""), ("loss", "nat"), ("gap", "mnat"), ("error, forward", "×1e-3")]
    headings += [("error, gradients", "×1e-3"), ("floor, gradients", "×1e-3"), ("lowest ‖g‖/‖noise‖", "")]
    rows: list[list[Cell]] = []
    for policy in report.policies:
        mine = report.rows[policy]
        forward = mean(r.measured.mse for r in mine if r.what == "y")
        error = mean(r.measured.mse for r in _gradients(mine))
        floor = mean(r.measured.law.floor.mean for r in _gradients(mine))
        loss, gap = report.losses[policy], 1e3 * (report.losses[policy] - report.losses["bf16"])
        ratio = min(report.ratios.get(policy, {}).values(), default=math.inf)
        numbers = [
            _number(loss, ".4f"),
            _number(gap, "+.1f"),
            *(_number(1e3 * v, ".3f") for v in (forward, error, floor)),
        ]
        rows.append([policy, *numbers, _number(ratio, ".2f", ratio < SQRT3)])
    return table(headings, rows, [_hue(i + 1) for i in range(len(rows))])


MEASURES = [
    ("error", "×1e-3"),
    ("signed", "×1e-3"),
    ("misaligned", "×1e-3"),
    ("noise", "×1e-3"),
    ("floor", "×1e-3"),
    ("ratio", "at 256"),
    ("SNR", "dB"),
    ("flushed", "% elements"),
    ("underflow", "% blocks"),
    ("saturation", "% blocks"),
]


def _means(rows: list[Row]) -> str:
    """A row for each operand and product: the mean over layers."""
    kinds = list(dict.fromkeys((row.gemm, row.what, row.spec.key if row.spec else "") for row in rows))
    cells: list[list[Cell]] = []
    for gemm, what, key in kinds:
        mine = [r for r in rows if (r.gemm, r.what, r.spec.key if r.spec else "") == (gemm, what, key)]
        m = [r.measured for r in mine]
        floor, variance = mean(x.law.floor.mean for x in m), mean(x.law.variance for x in m)
        mse = mean(x.mse for x in m)
        drifts = any(r.drifts for r in mine)
        numbers = [
            _number(1e3 * mse, ".3f"),
            _number(1e3 * mean(x.signed.mean for x in m), "+.2f"),
            _number(1e3 * mean(x.misalignment for x in m), "+.2f"),
            _number(1e3 * variance, ".3f"),
            _number(1e3 * floor, ".3f", drifts),
            _number(ratio_of(variance, max(floor, 0.0)), ".1f", drifts),
            _number(-10 * math.log10(mse) if mse > 0 else math.inf, ".1f"),
            *_shares(m, what in PRODUCTS.values()),
        ]
        cells.append([f"{gemm}, {what}", _short(key), *numbers])
    return table([("operand", ""), ("spec", ""), *MEASURES], cells)


def _rows(rows: list[Row]) -> str:
    cells: list[list[Cell]] = []
    for row in rows:
        m, law = row.measured, row.measured.law
        numbers = [
            _number(1e3 * m.mse, ".3f"),
            (_interval(m.signed), m.signed.mean),
            _number(1e3 * m.misalignment, "+.2f"),
            _number(1e3 * law.variance, ".3f"),
            (_interval(law.floor), law.floor.mean, row.drifts),
            (_interval(law.ratio, 1.0), law.ratio.mean, row.drifts),
            _number(m.snr, ".1f"),
            *_shares([m], row.is_product),
        ]
        cells.append(
            [row.module, f"{row.gemm}, {row.what}", _short(row.spec.key if row.spec else ""), row.of, *numbers]
        )
    return table([("layer", ""), ("operand", ""), ("spec", ""), ("reference", ""), *MEASURES], cells)


def _shares(measured: list[Measured], product: bool) -> list[Cell]:
    if product:
        return ["–", "–", "–"]
    means = (mean(getattr(m, what) for m in measured) for what in ("flushed", "underflow", "saturation"))
    return [_number(100 * value, ".2f") for value in means]


def _histograms(report: Report) -> str:
    parts = []
    for policy in report.policies:
        lines = []
        for hue, what in enumerate(("x", "w", "dy"), 1):
            rows = report.rows[policy]
            mine = [r.measured.histogram for r in rows if r.what == what and r.measured.histogram]
            total = [sum(counts) for counts in zip(*mine, strict=True)]
            last = max((byte for byte, n in enumerate(total) if n), default=-1)
            blocks = sum(total) or 1
            lines.append(Line(what, [(byte, 100 * n / blocks) for byte, n in enumerate(total[: last + 2])], hue))
        legend = [(line.hue, line.name) for line in lines if line.points]
        label = f"{policy}: share of blocks by scale byte"
        picture = _figure(lines, label, "% of blocks", legend, "scale byte", zero=True)
        parts.append(f"<h3>{escape(policy)}</h3>{picture}")
    return "".join(parts)


def _layers(report: Report) -> str:
    headings = [
        ("layer", ""),
        ("shape", "[E×]N×K"),
        ("amax x", ""),
        ("amax w", ""),
        ("amax dy", ""),
        ("outlier channels", "of x"),
    ]
    headings += [(f"‖g‖/‖noise‖, {policy}", "") for policy in report.policies]
    rows: list[list[Cell]] = []
    for name, f in report.layers.items():
        shape, amax = f["shape"], f["amax"]
        channels = ", ".join(f"{i} (×{times:.0f})" for i, times in f["outlier_channels"][:3]) or "–"
        ratios = [report.ratios.get(policy, {}).get(name) for policy in report.policies]
        numbers = [_number(max(amax["x"]), ".3g"), _number(amax["w"], ".3g"), _number(max(amax["dy"]), ".2e")]
        shown = ["–" if r is None else _number(r, ".1f", r < SQRT3) for r in ratios]
        rows.append(
            [
                name,
                ("×".join(map(str, shape)), math.prod(shape)),
                *numbers,
                (channels, f["outlier_channels_total"]),
                *shown,
            ]
        )
    return table(headings, rows)


def _amax(report: Report) -> str:
    lines: list[Line] = []
    legend: list[tuple[int, str]] = []
    series = report.facts.get("amax_by_step") or {
        name: list(enumerate(f["amax"]["dy"], 1)) for name, f in report.layers.items()
    }
    loudest = sorted(series, key=lambda name: -max((y / (series[name][0][1] or 1) for _, y in series[name]), default=0))
    for name in loudest[:7]:
        first = series[name][0][1] or 1.0
        hue = _hue(len(legend) + 1)
        lines.append(Line(name, [(x, y / first) for x, y in series[name]], hue))
        legend.append((hue, name))
    across = "step" if report.facts.get("amax_by_step") else "batch"
    return _figure(lines, "Largest gradient by batch", "relative to the first", legend, across, zero=True)


def _advice(advice: Advice) -> list[str]:
    parts = [f"<h2>Advice for the goal {escape(advice.goal)}</h2>"]
    headings = [("candidate", ""), ("error", "×1e-3"), ("floor", "×1e-3"), ("faulty layers", ""), ("time", "ns/token")]
    for which, scores in advice.ranked.items():
        rows: list[list[Cell]] = [
            [
                s.name,
                _number(1e3 * s.error, ".3f"),
                _number(1e3 * s.drift, ".3f"),
                _number(len(s.faults), "d", bool(s.faults)),
                _number(1e9 * s.seconds, ".3g"),
                _number(s.bits, "g"),
            ]
            for s in scores
        ]
        parts += [f"<h3>Pretraining, {which}</h3>", table([*headings, ("stored", "bit/element")], rows)]
    base, now = advice.loss
    parts.append(
        soft(f"Best first. Times are estimated for {advice.machine}. Loss {base:.4f} plain, {now:.4f} quantized.")
    )
    return [*parts, f"<pre>{escape(advice.text())}</pre>"]


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean; 0 for no values."""
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _number(value: float, form: str, bad: bool = False) -> tuple[str, float, bool]:
    if isinstance(value, float) and not math.isfinite(value):
        return "–", 1e300, False
    form = ".2e" if abs(value) >= 1e5 else form
    return format(value, form).replace("-", "−"), value, bad


def _interval(i: Interval, unit: float = 1e3) -> str:
    if i.low == i.high:
        return f"{unit * i.mean:.3g}"
    return f"{unit * i.mean:.2g} [{unit * i.low:.2g}, {unit * i.high:.2g}]"


def _short(key: str) -> str:
    return key.replace("/none", "").replace("/1x16/tensor", "").replace("/nearest", "") or "–"


def _hue(i: int) -> int:
    return 1 + (i - 1) % 7
