"""report.html: one file that tells what a run was and what it found. It loads nothing, so it can be kept and sent.

Also loss.png, the same curves for places that show pictures, if matplotlib is installed.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from fp4ext.pages.chart import Line, chart
from fp4ext.pages.page import dot, figure, page, pairs, soft

from . import disk
from .directory import read_config, read_metrics
from .display import cells
from .result import Result

HEADINGS = (  # name, unit, and both for a narrow page
    ("policy", "", ""),
    ("validation loss", "nat/byte", "loss"),
    ("gap to bf16", "mnat", "gap, mnat"),
    ("weights", "bit/element", "weights, bit"),
    ("saved activations", "bit/element", "saved act., bit"),
    ("time", "s/step", "s/step"),
)

LOAD = ("expert load", "min … max", "expert load")

ABOUT_LOAD = (
    "Expert load: tokens of the idlest and of the busiest expert over an even share, in the worst layer, in the last "
    "tenth of the run; 1 is even. A bias on the router's choice evens them out, without a loss."
)

ABOUT_TABLE = (
    "Gap: validation loss less that of bf16, on the same windows; ± is its standard error over those windows. "
    "Another seed moves it too: compare several before believing a small difference. Bits per stored element count "
    "codes and scales of the converted layers: weights as a product reads them, activations as they wait for backward."
)


def write(out: Path, result: Result) -> None:
    """Write report.html and loss.png into the run directory."""
    config, metrics = read_config(out), read_metrics(out)
    disk.replace(out / "report.html", render(config, metrics, result).encode())
    _picture(out / "loss.png", config, metrics)


def render(config: dict, metrics: list[dict], result: Result) -> str:
    """The page."""
    run, data = config["run"], config["data"]
    preset, policies = run["preset"], run["policies"]
    title = f"Pretraining the {preset['name']} preset"
    if preset.get("model") == "inkling2":
        title = f"Pretraining {preset['name']}, Inkling2ForCausalLM of transformers {config['facts']['transformers']}"
    said = (
        f"{preset['steps']} steps of {preset['batch']} × {preset['shape']['context']} bytes of {data['source']}, "
        f"{len(policies)} {'policies' if len(policies) > 1 else 'policy'} from the same weights on the same batches, "
        f"seed {run['seed']}."
    )
    left = {name: why for row in result.rows if row.policy != "bf16" for name, why in row.left.items()}
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(summary(result))}</p>",
        soft(said),
        *sections(config, metrics, result),
        *(["<h2>What is not quantized</h2>", pairs(left)] if left else []),
        "<h2>To repeat it</h2>",
        f"<pre>{escape(config['command'])}</pre>",
        "<h2>Configuration</h2>",
        pairs(_flat({"preset": preset, **{k: v for k, v in run.items() if k not in ("preset", "policies")}})),
        "<h2>Text and versions</h2>",
        pairs(_flat({"text": {k: v for k, v in data.items() if k != "paths"}, **config["facts"]})),
    ]
    return page(title, parts)


def sections(config: dict, metrics: list[dict], result: Result, level: int = 2) -> list[str]:
    """The table and the curves, under headings of that level."""
    preset, policies = config["run"]["preset"], config["run"]["policies"]
    parts = [
        f"<h{level}>Result</h{level}>",
        _table(policies, result),
        soft(ABOUT_TABLE),
        f"<h{level}>Loss</h{level}>",
        _figure(loss_lines(policies, metrics), policies, "Loss by step", "nat/byte", _top(metrics)),
        soft("Points: validation loss. Faint: training loss of single batches. The first steps leave the picture."),
    ]
    gaps = gap_lines(policies, metrics, preset["steps"])
    if gaps:
        parts += [
            f"<h{level}>Gap to bf16</h{level}>",
            _figure(gaps, policies, "Gap of the validation loss to bf16 by step", "mnat", None, zero=True),
            soft(
                f"From evaluations along the way, {preset['eval_windows']} windows each; the first tenth is left out."
            ),
        ]
    loads = load_lines(policies, metrics)
    if loads:
        parts += [
            f"<h{level}>Balance of the experts</h{level}>",
            _figure(loads, policies, "Load of the busiest expert by step", "× an even share", None),
            soft(ABOUT_LOAD),
        ]
    return parts


def loss_lines(policies: list[str], metrics: list[dict]) -> list[Line]:
    lines = []
    for hue, policy in _hues(policies):
        mine = [line for line in metrics if line["policy"] == policy]
        lines.append(Line(policy, _points(mine, "train_loss"), hue, faint=True))
        lines.append(Line(policy, _points(mine, "valid_loss"), hue))
    return lines


def gap_lines(policies: list[str], metrics: list[dict], steps: int) -> list[Line]:
    """Validation loss less bf16's, in mnat; none if there is no bf16 arm or nothing to compare with it."""
    loss = {
        policy: dict(_points([line for line in metrics if line["policy"] == policy], "valid_loss"))
        for policy in policies
    }
    base = loss.get("bf16")
    if base is None or len(policies) < 2:
        return []
    lines = []
    for hue, policy in _hues(policies):
        points = [(x, 1e3 * (y - base[x])) for x, y in loss[policy].items() if x in base and 10 * x >= steps]
        if policy != "bf16":
            lines.append(Line(policy, points, hue))
    return lines


def load_lines(policies: list[str], metrics: list[dict]) -> list[Line]:
    """The load of the busiest expert; none for a dense model."""
    lines = []
    for hue, policy in _hues(policies):
        points = _points([line for line in metrics if line["policy"] == policy], "load_max")
        lines += [Line(policy, points, hue)] if points else []
    return lines


def summary(result: Result) -> str:
    rows = [row for row in result.rows if row.final_loss is not None and row.diverged is None]
    if not rows:
        return "No policy finished with a finite loss."
    best, worst = min(row.final_loss for row in rows), max(row.final_loss for row in rows)
    began = f" from {rows[0].start_loss:.3f}" if rows[0].start_loss is not None else ""
    ended = f"{best:.3f}" if len(rows) == 1 else f"between {best:.3f} and {worst:.3f}"
    text = f"Validation loss went{began} to {ended} nat/byte."
    gaps = [row for row in rows if row.gap is not None and row.policy != "bf16"]
    if gaps:
        text += " Gap to bf16: " + ", ".join(f"{row.policy}\u00a0{row.gap:+.1f}" for row in gaps) + " mnat."
    diverged = [f" {row.policy} diverged at step {row.diverged}." for row in result.rows if row.diverged is not None]
    return text + "".join(diverged)


def _table(policies: list[str], result: Result) -> str:
    headings = (*HEADINGS, LOAD) if any(row.load_max is not None for row in result.rows) else HEADINGS
    head = "".join(f"<th>{name}<small>{unit}</small></th>" for name, unit, _ in headings)
    body = []
    hues = {policy: hue for hue, policy in _hues(policies)}
    for row in result.rows:
        policy, loss, gap, *others = (escape(cell) for cell in cells(row))
        gap = gap.replace(" ± ", " <small>± ") + "</small>" if "±" in gap else gap
        texts = (dot(hues[row.policy]) + policy, loss, f"<span>{gap}</span>", *others)
        body.append(
            "".join(
                f'<td data-label="{short}">{text}</td>' for (_, _, short), text in zip(headings, texts, strict=False)
            )
        )
    rows = "".join(f"<tr>{cells_}</tr>" for cells_ in body)
    return f'<div class="scroll"><table class="rows"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _figure(
    lines: list[Line], policies: list[str], label: str, unit: str, top: float | None, zero: bool = False
) -> str:
    shown = {line.name for line in lines}
    legend = [(hue, policy) for hue, policy in _hues(policies) if policy in shown]
    wide, narrow = (chart(lines, label, unit, w, h, top, zero) for w, h in ((940, 380), (360, 300)))
    return figure((wide, narrow), legend)


def _flat(values: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _hues(policies: list[str]) -> list[tuple[int, str]]:
    """bf16 is drawn in the ink's colour, the others in turn."""
    others = [policy for policy in policies if policy != "bf16"]
    return [(0 if policy == "bf16" else 1 + others.index(policy) % 7, policy) for policy in policies]


def _points(lines: list[dict], key: str) -> list[tuple[float, float]]:
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def _top(metrics: list[dict]) -> float | None:
    """The loss below which all of the run but its first tenth lies."""
    last = max((line["step"] for line in metrics), default=0)
    late = [y for key in ("train_loss", "valid_loss") for x, y in _points(metrics, key) if 10 * x >= last]
    return max(late) if late else None


def _picture(path: Path, config: dict, metrics: list[dict]) -> None:
    try:
        import matplotlib
    except ImportError:  # optional; the report has the curves
        return
    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    policies, steps = config["run"]["policies"], config["run"]["preset"]["steps"]
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots(1, 2)
    colours = {policy: "black" if hue == 0 else f"C{hue - 1}" for hue, policy in _hues(policies)}
    for line in loss_lines(policies, metrics):
        style = {"alpha": 0.3, "linewidth": 0.8} if line.faint else {"marker": "o", "markersize": 3, "label": line.name}
        axes[0].plot([x for x, _ in line.points], [y for _, y in line.points], color=colours[line.name], **style)
    for line in gap_lines(policies, metrics, steps):
        style = {"marker": "o", "markersize": 3, "label": line.name}
        axes[1].plot([x for x, _ in line.points], [y for _, y in line.points], color=colours[line.name], **style)
    top = _top(metrics)
    if top is not None:
        axes[0].set_ylim(top=1.02 * top)
    axes[1].axhline(0, color="black", linewidth=0.8, linestyle="--")
    for axis, label in zip(axes, ("loss, nat/byte (points: validation)", "gap to bf16, mnat"), strict=True):
        axis.set(xlabel="step", ylabel=label)
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
    aside = path.with_name(f".{path.name}.writing")
    figure.savefig(aside, format="png")
    aside.rename(path)
