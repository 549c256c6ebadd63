"""What RL shows of itself."""

from __future__ import annotations

from collections.abc import Callable

from ..runs.view import Column, Curve, View, measured, smooth

REWARD, MEAN_D, MAX_D = "critic/rewards/mean", "rollout_corr/mean_abs_d", "rollout_corr/max_abs_d"
ESS = "rollout_corr/rollout_is_eff_sample_size"

ABOUT = (
    "Reward: the mean over the evaluation's prompts, completions drawn at the run's temperature; one seed, so small "
    "differences between arms are chance. d is the trainer's log-prob of a sampled token less the sampler's: mean over "
    "all steps, largest of all, and KL = mean(−d). ESS: the smallest effective sample size of a step, as a share. "
    "Where max |d| is 0 trainer and sampler are the same function, to the bit."
)


def _short(line: dict) -> str:
    if "eval/reward" in line:
        return f"{line['arm']} {line['eval/reward']:.3f}"
    if REWARD not in line:
        return f"{line['arm']} diverged at {line['diverged']}"
    return f"{line['arm']} {line[REWARD]:.3f} (|d| {line[MEAN_D]:.2g})"


def _line(lines: list[dict]) -> str:
    what = "reward on the evaluation's prompts" if "eval/reward" in lines[0] else "reward"
    return f"{what}: {'  '.join(map(_short, lines))}"


def _live(key: str, form: str) -> Callable[[str, dict, dict], str]:
    return lambda name, arm, arms: format(arm[key], form) if key in arm else "–"


def _live_reward(name: str, arm: dict, arms: dict) -> str:
    return f"diverged at {arm['diverged']}" if arm.get("diverged") else _live(REWARD, ".3f")(name, arm, arms)


def _reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _d(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}"


def _after(row) -> str:
    return f"diverged at step {row.diverged}" if row.diverged is not None else _reward(row.reward_after)


def _said(config: dict) -> str:
    run, count = config["run"], len(config["run"]["arms"])
    return (
        f"{run['steps']} steps of {run['prompts']} prompts × {run['group']} completions of the task {run['task']}, "
        f"{count} {'arms' if count > 1 else 'arm'} from the same weights, 4 bits by {run['policy']}, "
        f"seed {run['seed']}."
    )


def _summary(result) -> str:
    rows = [row for row in result.rows if row.reward_after is not None and row.diverged is None]
    told = "; ".join(f"{row.arm} {row.reward_before:.3f} to {row.reward_after:.3f}" for row in rows)
    same = [row.arm for row in result.rows if row.max_abs_d == 0]
    text = f"Reward went from before to after: {told}."
    if same:
        text += f" Trainer and sampler agreed to the bit on every token: {', '.join(same)}."
    return text + "".join(f" {row.arm} diverged at step {row.diverged}." for row in result.rows if row.diverged)


def _rewards(lines, base, run):
    points = measured(REWARD, lines)
    return [points, smooth(points, 5)]


def _of(key: str):
    return lambda lines, base, run: [measured(key, lines)]


VIEW = View(
    key="arm",
    evaluated="eval/reward",
    line=_line,
    smoothed=(REWARD, MEAN_D, ESS, "seconds"),
    memory=0.8,
    newest=("eval/reward", "diverged"),
    largest=(MAX_D,),
    live=(
        ("evaluated", _live("eval/reward", ".3f")),
        ("reward", _live_reward),
        ("mean |d|", _live(MEAN_D, ".2g")),
        ("max |d|", _live(MAX_D, ".2g")),
        ("ESS", _live(ESS, ".3f")),
        ("s/step", _live("seconds", ".2f")),
    ),
    columns=(
        Column("arm", "", "arm", lambda row: row.arm),
        Column("reward before", "of 1", "reward\nbefore", lambda row: _reward(row.reward_before)),
        Column("reward after", "of 1", "reward\nafter", _after),
        Column("mean |d|", "nat", "mean|d|\nnat", lambda row: _d(row.mean_abs_d)),
        Column("max |d|", "nat", "max|d|\nnat", lambda row: _d(row.max_abs_d)),
        Column("KL", "nat", "KL\nnat", lambda row: _d(row.kl)),
        Column("ESS", "least share", "least\nESS", lambda row: f"{row.ess:.3f}"),
        Column("weights", "bit/element", "weight\nbits", lambda row: f"{row.weight_bits:.2f}"),
        Column("sampling", "token/s", "token\n/s", lambda row: f"{row.tokens_per_second:.0f}"),
        Column("time", "s/step", "time\ns/step", lambda row: f"{row.seconds:.2f}"),
    ),
    title=lambda config: "Reinforcement in 4 bits",
    said=_said,
    summary=_summary,
    about=ABOUT,
    curves=(
        Curve(
            "Mean reward of a step's completions",
            "reward",
            _rewards,
            heading="Reward",
            remark="Faint: single steps. Strong: the mean of five.",
        ),
        Curve("Mean |d| of each step", "nat", _of(MEAN_D), heading="Trainer against sampler", zero=True),
        Curve("Largest |d| of each step", "nat", _of(MAX_D), zero=True),
        Curve("Entropy of the policy by step", "nat", _of("actor/entropy"), heading="Entropy and length", zero=True),
        Curve("Tokens per completion by step", "token", _of("response_length/mean")),
    ),
)
