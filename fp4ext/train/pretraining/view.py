"""What pretraining shows of itself."""

from __future__ import annotations

from ..runs.view import Column, Curve, View, measured

ABOUT = (
    "Gap: validation loss less that of bf16, on the same windows; ± is its standard error over those windows. "
    "Another seed moves it too: compare several before believing a small difference. Bits per stored element count "
    "codes and scales of the converted layers: weights as a product reads them, activations as they wait for backward."
)
ABOUT_LOAD = (
    "Expert load: tokens of the idlest and of the busiest expert over an even share, in the worst layer, in the last "
    "tenth of the run; 1 is even. A bias on the router's choice evens them out, without a loss."
)


def _loss(line: dict, word: str) -> str:
    if line.get("diverged") is not None:
        return f"diverged at {line['diverged']}"
    value = line.get(f"{word}_loss")
    return "–" if value is None else f"{value:.3f}"


def _line(lines: list[dict]) -> str:
    word = "valid" if "valid_loss" in lines[0] else "train"
    return f"{word} loss: " + "  ".join(f"{line['policy']} {_loss(line, word)}" for line in lines)


def _live_gap(name: str, arm: dict, arms: dict) -> str:
    loss, base = arm.get("valid_loss"), arms.get("bf16", {}).get("valid_loss")
    return "" if name == "bf16" or loss is None or base is None else f"{1e3 * (loss - base):+.1f}"


def _final_loss(row) -> str:
    if row.diverged is not None:
        return f"diverged at step {row.diverged}"
    return "not finite" if row.final_loss is None else f"{row.final_loss:.4f}"


def _gap(row) -> str:
    if row.gap is None or row.policy == "bf16":
        return "–"
    return f"{row.gap:+.1f}" + (f" ± {row.gap_error:.1f}" if row.gap_error is not None else "")


def _load(row) -> str:
    return "–" if row.load_max is None else f"{row.load_min:.2f} … {row.load_max:.2f}"


def _has_experts(result) -> bool:
    return any(row.load_max is not None for row in result.rows)


def _remarks(result) -> list[str]:
    loads = ", ".join(f"{row.policy} {_load(row)}" for row in result.rows)
    return [f"expert load, × an even share: {loads}"] if _has_experts(result) else []


def _title(config: dict) -> str:
    preset = config["run"]["preset"]
    if preset.get("model") == "inkling2":
        return f"Pretraining {preset['name']}, Inkling2ForCausalLM of transformers {config['facts']['transformers']}"
    return f"Pretraining the {preset['name']} preset"


def _said(config: dict) -> str:
    run, preset = config["run"], config["run"]["preset"]
    count = len(run["policies"])
    return (
        f"{preset['steps']} steps of {preset['batch']} × {preset['shape']['context']} bytes of "
        f"{config['data']['source']}, {count} {'policies' if count > 1 else 'policy'} from the same weights on the "
        f"same batches, seed {run['seed']}."
    )


def _summary(result) -> str:
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
    return text + "".join(f" {row.policy} diverged at step {row.diverged}." for row in result.rows if row.diverged)


def _gaps(lines, base, run):
    """Validation loss less bf16's in mnat, after the first tenth of the run."""
    if base is None or lines is base:
        return []
    loss, steps = dict(measured("valid_loss", base)), run["preset"]["steps"]
    points = measured("valid_loss", lines)
    return [[(x, 1e3 * (y - loss[x])) for x, y in points if x in loss and 10 * x >= steps]]


LOSS = Curve(
    "Loss",
    "nat/byte",
    lambda lines, base, run: [measured("train_loss", lines), measured("valid_loss", lines)],
    heading="Loss",
    late=True,
    remark="Points: validation loss. Faint: training loss of single batches. The first steps leave the picture.",
)
GAP = Curve(
    "Gap of the validation loss to bf16",
    "mnat",
    _gaps,
    heading="Gap to bf16",
    zero=True,
    remark="From the evaluations along the way, of fewer windows than the last one; the first tenth is left out.",
)
LOAD = Curve(
    "Load of the busiest expert",
    "× an even share",
    lambda lines, base, run: [measured("load_max", lines)],
    heading="Balance of the experts",
    remark=ABOUT_LOAD,
)

VIEW = View(
    key="policy",
    evaluated="valid_loss",
    line=_line,
    smoothed=("train_loss", "seconds"),
    memory=0.9,
    newest=("valid_loss", "diverged"),
    live=(
        ("train loss", lambda name, arm, arms: _loss(arm, "train")),
        ("valid loss", lambda name, arm, arms: _loss(arm, "valid")),
        ("gap, mnat", _live_gap),
        ("s/step", lambda name, arm, arms: f"{arm['seconds']:.2f}" if "seconds" in arm else ""),
    ),
    columns=(
        Column("policy", "", "policy", lambda row: row.policy),
        Column("validation loss", "nat/byte", "valid loss\nnat/byte", _final_loss),
        Column("gap to bf16", "mnat", "gap to bf16\nmnat", _gap),
        Column("weights", "bit/element", "weights\nbit/element", lambda row: f"{row.weight_bits:.2f}"),
        Column("saved activations", "bit/element", "saved act.\nbit/element", lambda row: f"{row.activation_bits:.2f}"),
        Column("time", "s/step", "time\ns/step", lambda row: "–" if row.seconds is None else f"{row.seconds:.3f}"),
        Column("expert load", "min … max", "", _load, there=_has_experts),
    ),
    remarks=_remarks,
    title=_title,
    said=_said,
    summary=_summary,
    about=ABOUT,
    curves=(LOSS, GAP, LOAD),
    picture=(LOSS, GAP),
    left=lambda result: {name: why for row in result.rows if row.policy != "bf16" for name, why in row.left.items()},
)
