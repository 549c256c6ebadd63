"""report.html of an RL run: what the arms earned, and how far each trainer was from its sampler."""

from __future__ import annotations

from html import escape
from pathlib import Path

from fp4ext.pages.chart import Line, chart
from fp4ext.pages.page import figure, page, pairs, soft, table

from ..runs import disk
from ..runs.directory import read_config, read_metrics
from .display import HEADINGS, cells
from .result import Result

ABOUT = (
    "Reward: the mean over the evaluation's prompts, completions drawn at the run's temperature; one seed, so small "
    "differences between arms are chance. d is the trainer's log-prob of a sampled token less the sampler's: mean over "
    "all steps, largest of all, and KL = mean(−d). ESS: the smallest effective sample size of a step, as a share. "
    "Where max |d| is 0 trainer and sampler are the same function, to the bit."
)


def write(out: Path, result: Result) -> None:
    """Write report.html into the run directory."""
    disk.replace(out / "report.html", render(read_config(out), read_metrics(out), result).encode())


def render(config: dict, metrics: list[dict], result: Result) -> str:
    """The page."""
    run, data = config["run"], config["data"]
    arms = run["arms"]
    said = (
        f"{run['steps']} steps of {run['prompts']} prompts × {run['group']} completions of the task {run['task']}, "
        f"{len(arms)} {'arms' if len(arms) > 1 else 'arm'} from the same weights, 4 bits by {run['policy']}, "
        f"seed {run['seed']}."
    )
    parts = [
        "<h1>Reinforcement in 4 bits</h1>",
        f"<p>{escape(summary(result))}</p>",
        soft(said),
        *sections(config, metrics, result),
        "<h2>To repeat it</h2>",
        f"<pre>{escape(config['command'])}</pre>",
        "<h2>Configuration</h2>",
        pairs({k: v for k, v in run.items() if k != "arms" and v is not None}),
        "<h2>Start and versions</h2>",
        pairs({**data.get("start", {"run": "start/, pretrained first"}), **config["facts"]}),
    ]
    return page("Reinforcement in 4 bits", parts)


def sections(config: dict, metrics: list[dict], result: Result, level: int = 2) -> list[str]:
    """The table and the curves, under headings of that level."""
    arms = config["run"]["arms"]
    return [
        f"<h{level}>Result</h{level}>",
        _table(arms, result),
        soft(ABOUT),
        f"<h{level}>Reward</h{level}>",
        _figure(arms, metrics, "critic/rewards/mean", "Mean reward of a step's completions", "reward", smooth=5),
        soft("Faint: single steps. Strong: the mean of five."),
        f"<h{level}>Trainer against sampler</h{level}>",
        _figure(arms, metrics, "rollout_corr/mean_abs_d", "Mean |d| of each step", "nat", zero=True),
        _figure(arms, metrics, "rollout_corr/max_abs_d", "Largest |d| of each step", "nat", zero=True),
        f"<h{level}>Entropy and length</h{level}>",
        _figure(arms, metrics, "actor/entropy", "Entropy of the policy by step", "nat", zero=True),
        _figure(arms, metrics, "response_length/mean", "Tokens a completion by step", "token"),
    ]


def summary(result: Result) -> str:
    rows = [row for row in result.rows if row.reward_after is not None and row.diverged is None]
    told = "; ".join(f"{row.arm} {row.reward_before:.3f} to {row.reward_after:.3f}" for row in rows)
    same = [row.arm for row in result.rows if row.max_abs_d == 0]
    text = f"Reward went from before to after: {told}."
    if same:
        text += f" Trainer and sampler agreed to the bit on every token: {', '.join(same)}."
    return text + "".join(f" {row.arm} diverged at step {row.diverged}." for row in result.rows if row.diverged)


def _table(arms: list[str], result: Result) -> str:
    hues = dict(_hues(arms))
    rows = [list(cells(row)) for row in result.rows]
    return table([(name, unit) for name, unit, _ in HEADINGS], rows, [hues[row.arm] for row in result.rows])


def _figure(
    arms: list[str], metrics: list[dict], key: str, label: str, unit: str, smooth: int = 1, zero: bool = False
) -> str:
    lines = []
    for name, hue in _hues(arms):
        points = [(line["step"], line[key]) for line in metrics if line["arm"] == name and line.get(key) is not None]
        if smooth > 1:
            lines.append(Line(name, points, hue, faint=True))
            ends = range(smooth, len(points) + 1)
            points = [(points[i - 1][0], sum(y for _, y in points[i - smooth : i]) / smooth) for i in ends]
        lines.append(Line(name, points, hue))
    charts = (chart(lines, label, unit, w, h, None, zero) for w, h in ((940, 320), (360, 280)))
    return soft(f"{label}, {unit}") + figure(tuple(charts), [(hue, name) for name, hue in _hues(arms)])


def _hues(arms: list[str]) -> list[tuple[str, int]]:
    """bf16 is drawn in the ink's colour, the others in turn."""
    others = [arm for arm in arms if arm != "bf16"]
    return [(arm, 0 if arm == "bf16" else 1 + others.index(arm) % 7) for arm in arms]
