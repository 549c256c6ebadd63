"""What each stage found, in a line: for the display, the table at the end and the report."""

from __future__ import annotations

from .result import Exported, Reloaded, Result

TITLES = {
    "pretrain": "pretraining in BF16 and in 4 bits, side by side",
    "rl": "reinforcement: a 4-bit sampler, a trainer that agrees with it",
    "export": "a 4-bit checkpoint",
    "reload": "the model again from that checkpoint alone: the same tokens?",
}
CHECKED = "greedy tokens and their log-probs, before and after"


def outcome(stage: str, found) -> str:
    """A stage's result in words."""
    return {"pretrain": _gaps, "rl": _rewards, "export": _size, "reload": _equal}[stage](found)


def rows(result: Result) -> list[tuple[str, str, str, float]]:
    """(stage, what was done, what was found, seconds) of all stages."""
    losses, rewards = result.pretrained, result.reinforced
    what = (
        f"{losses.step} steps, {len(losses.rows)} policies",
        f"{rewards.step} steps, {len(rewards.rows)} {'arms' if len(rewards.rows) > 1 else 'arm'}",
        f"layout {result.exported.layout}",
        f"{result.reloaded.prompts} prompts continued greedily, read by {result.reloaded.by}",
    )
    found = (losses, rewards, result.exported, result.reloaded)
    return [
        (f"{number} {stage}", what[number - 1], outcome(stage, found[number - 1]), result.seconds.get(stage, 0.0))
        for number, stage in enumerate(TITLES, 1)
    ]


def _gaps(result) -> str:
    gaps = [
        f"{row.policy} {row.gap:+.1f}" + (f" ± {row.gap_error:.1f}" if row.gap_error is not None else "")
        for row in result.rows
        if row.gap is not None and row.policy != "bf16"
    ]
    if gaps:
        return f"gap to bf16, mnat: {', '.join(gaps)}"
    losses = [f"{row.policy} {row.final_loss:.3f}" for row in result.rows if row.final_loss is not None]
    return f"loss, nat/byte: {', '.join(losses) or 'not finite'}"


def _rewards(result) -> str:
    number = lambda value: "–" if value is None else f"{value:.3f}"  # noqa: E731
    d = lambda value: "0" if value == 0 else f"{value:.2g} nat"  # noqa: E731
    return "; ".join(
        f"{row.arm}: reward {number(row.reward_before)} → {number(row.reward_after)}, max |d| {d(row.max_abs_d)}"
        for row in result.rows
    )


def _size(found: Exported) -> str:
    formats = ", ".join(f"{count} weights in {name}" for name, count in found.formats.items())
    return (
        f"{found.bytes:,} bytes, in BF16 {found.bf16_bytes:,} ({found.bf16_bytes / found.bytes:.2f}×); "
        f"{formats} at {found.bits:.2f} bit/element"
    )


def _equal(found: Reloaded) -> str:
    text = f"{found.tokens_equal} of {found.tokens} tokens equal, "
    exact = found.logprobs_equal == found.tokens
    text += "log-probs to the bit" if exact else f"log-probs up to {found.largest:.2g} nat apart"
    if found.sampler_equal is not None:
        text += f"; {found.sampler_equal} as the 4-bit sampler's, which rounds activations too"
    return text
