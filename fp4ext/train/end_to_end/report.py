"""report.html of the four stages: what each found, then each stage's table and curves."""

from __future__ import annotations

from html import escape
from pathlib import Path

from fp4ext.pages.page import page, pairs, soft, table

from ..pretraining.view import VIEW as PRETRAINING
from ..rl.view import VIEW as RL
from ..runs import disk
from ..runs.directory import read_config, read_metrics
from ..runs.display import clock
from ..runs.report import sections
from .result import Result
from .words import outcome, rows

ABOUT_EXPORT = (
    "Bytes of the tensors, scales included. What is not quantized (embedding, head, router, norms) keeps the fp32 of "
    "its master weights, which is most of a model as small as this one."
)
ABOUT_RELOAD = (
    "Before: the weights that reinforcement left, quantized in memory. After: the model rebuilt from the checkpoint's "
    "folder and nothing else. Both continue the same prompts, always by the most likely token."
)


def write(out: Path, result: Result) -> None:
    """Write report.html into the run directory."""
    disk.replace(out / "report.html", render(out, result).encode())


def render(out: Path, result: Result) -> str:
    """The page."""
    config = read_config(out)
    asked, preset = config["run"], config["run"]["preset"]
    folders = {stage: out / stage for stage in ("pretrain", "rl")}
    given = {stage: (read_config(path), read_metrics(path)) for stage, path in folders.items()}
    kind = "a mixture of experts" if preset["shape"].get("experts") else "a dense model"
    said = (
        f"The {preset['name']} preset, {kind}, on the task {asked['task']}, seed {asked['seed']}: pretrained on its "
        f"text under {len(asked['policies'])} policies; the arm {asked['policy']} reinforced by its reward; "
        f"the arm {asked['arms'][0]} of that written as a 4-bit checkpoint, and read back."
    )
    parts = [
        "<h1>Four stages in 4 bits</h1>",
        f"<p>{escape(_summary(result))}</p>",
        soft(said),
        table([("stage", ""), ("what", ""), ("found", ""), ("time", "m:s")], _stages(result)),
        "<h2>1 Pretraining</h2>",
        f"<p>{escape(PRETRAINING.summary(result.pretrained))}</p>",
        *sections(PRETRAINING, *given["pretrain"], result.pretrained, level=3),
        "<h2>2 Reinforcement</h2>",
        f"<p>{escape(RL.summary(result.reinforced))}</p>",
        *sections(RL, *given["rl"], result.reinforced, level=3),
        "<h2>3 Checkpoint</h2>",
        pairs(_exported(result)),
        soft(ABOUT_EXPORT),
        "<h2>4 Read back</h2>",
        pairs(_reloaded(result)),
        soft(ABOUT_RELOAD),
        "<h2>To repeat it</h2>",
        f"<pre>{escape(config['command'])}</pre>",
        "<h2>Configuration and versions</h2>",
        pairs({k: v for k, v in asked.items() if k not in ("preset", "policies", "arms")} | config["facts"]),
    ]
    return page("Four stages in 4 bits", parts)


def _summary(result: Result) -> str:
    row = result.reinforced.rows[0]
    parts = [f"Pretrained: {outcome('pretrain', result.pretrained)}."]
    if row.reward_before is not None and row.reward_after is not None:
        agreed = (
            "agreed to the bit on every token" if row.max_abs_d == 0 else f"were up to {row.max_abs_d:.2g} nat apart"
        )
        parts.append(
            f"Reinforced: reward {row.reward_before:.3f} to {row.reward_after:.3f}, trainer and sampler {agreed}."
        )
    parts.append(f"Written: {result.exported.bytes:,} bytes, in BF16 {result.exported.bf16_bytes:,}.")
    parts.append(f"Read back: {outcome('reload', result.reloaded)}.")
    return " ".join(parts)


def _stages(result: Result) -> list[list]:
    found = []
    for stage, what, said, seconds in rows(result):
        bad = stage.endswith("reload") and not result.reloaded.same
        found.append([stage, what, (said, said, bad) if bad else said, (clock(seconds), seconds)])
    return found


def _exported(result: Result) -> dict:
    e = result.exported
    return {
        "layout": e.layout,
        "quantized weights": ", ".join(f"{count} in {name}" for name, count in e.formats.items()),
        "their size": f"{e.packed_bytes:,} bytes, {e.bits:.2f} bit/element",
        "weights left as they are": e.plain,
        "all weights": f"{e.bytes:,} bytes",
        "all weights in BF16": f"{e.bf16_bytes:,} bytes, {e.bf16_bytes / e.bytes:.2f} times as many",
        "files": f"{e.file_bytes:,} bytes",
    }


def _reloaded(result: Result) -> dict:
    r = result.reloaded
    shown = {
        "read by": r.by,
        "prompts": r.prompts,
        "tokens": f"{r.tokens_equal} of {r.tokens} equal",
        "log-probs": f"{r.logprobs_equal} of {r.tokens} the same number; largest difference {r.largest:.2g} nat",
    }
    if r.sampler_equal is not None:
        shown["beside the 4-bit sampler"] = f"{r.sampler_equal} of {r.tokens} tokens equal; it rounds activations too"
    return shown
