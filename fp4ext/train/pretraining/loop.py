"""The main job: train one model under several policies, side by side, on the same text.

    for each step:   batch ← text(seed, step);   every arm takes the step
                     now and then: every arm reads the same validation windows; a checkpoint of all arms
    at the end:      a larger validation set, the table, the report

Arms advance together, so that a run stopped anywhere leaves them comparable. A resumed run continues bit for bit,
because everything that a step depends on is in the checkpoint or is a function of (seed, step).
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch

from fp4ext.errors import Refused

from .. import data
from ..runs import directory, report
from ..runs.config import compare, tell_changes
from ..runs.display import Silent
from ..runs.loop import advance
from . import result
from .arm import Arm
from .config import Config, agree, command, facts
from .result import Result
from .view import VIEW


def pretrain(config: Config, out: str | Path, show=None, tensorboard: bool = True) -> Result:
    """Train the arms of `config` in a new directory.

    Args:
        config: what to train.
        out: the run directory; new or empty.
        show: a display (runs/display.py); none: silent.
        tensorboard: also write TensorBoard events, if it is installed.

    Returns:
        Result, with `finished` False if a signal stopped the run; `resume(out)` goes on.

    Raises:
        Refused: an input that cannot be used, before anything is computed or written.
        Stopped: the disk gave out; the last checkpoint is intact.
    """
    show, out = show or Silent(), Path(out)
    directory.check_free(out, {"run": config.as_dict()})
    corpus = data.load(config.data, config.preset.shape.context)
    settings = {
        "run": config.as_dict(),
        "data": corpus.facts() | {"paths": list(config.data)},
        "facts": facts(config),
        "command": command(config),
    }
    with _settings(config):
        arms = _build(config)
        with directory.create(out, settings) as run:
            return _train(run, config, corpus, arms, 0, show, tensorboard)


def resume(out: str | Path, show=None, tensorboard: bool = True, asked: dict | None = None) -> Result:
    """Go on with the run in `out`, bit for bit as if it had never stopped.

    Args:
        asked: what the caller believes the run to be, by the names of Config (and "steps", "batch", "eval_every",
            "save_every" of its preset). A difference is refused: a run has one configuration. Where its text is the
            task of a file, `data` has to name that file, which is run: see task.agreed.
    """
    show, out = show or Silent(), Path(out)
    settings = directory.read_config(out)
    config = Config.from_dict(settings["run"], settings["data"]["paths"])
    data.agreed(config.data, (asked or {}).get("data"), out)
    config = agree(config, asked or {})
    with directory.reopen(out) as run, _settings(config):
        corpus = data.load(config.data, config.preset.shape.context)
        place = {name: settings["data"].get(name) for name in ("source", "paths")}  # the same text may have moved
        differences = compare(settings["data"], corpus.facts() | place)
        if differences:
            what = f"its text has changed ({'; '.join(differences)})"
            raise Refused(f"--resume {out}: {what}; accepted: the text that it began with")
        tell_changes(show, settings["facts"], facts(config))
        arms = _build(config)
        start = run.load(arms)
        return _train(run, config, corpus, arms, start, show, tensorboard)


def _train(
    run: directory.Run, config: Config, corpus: data.Corpus, arms: list[Arm], start: int, show, tensorboard: bool
) -> Result:
    p = config.preset
    windows = corpus.windows(p.eval_windows, p.shape.context)

    def evaluate(lines: list[dict], step: int) -> None:
        for a, line in zip(arms, lines, strict=True):
            mean = float(a.evaluate(*windows, step).mean())
            line["valid_loss"] = mean if math.isfinite(mean) else None

    def take(step: int) -> list[dict]:
        batch = corpus.batch(config.seed, step, p.batch, p.shape.context)
        lines, done = [a.step(*batch, step) for a in arms], step + 1
        evaluated = done % p.eval_every == 0 or done == p.steps
        if evaluated:
            evaluate(lines, done)
        for line in lines:
            for warning in line.get("warnings", ()):
                show.note(f"{line['policy']}: {warning}")
        if evaluated or done % p.log_every == 0 or any("stats" in line for line in lines):
            run.log(lines)
        return lines

    if not tensorboard:
        run.without_tensorboard()
    try:
        show.start(arms, start, p.steps, run.path)
        for a in arms:
            if p.model != "transformer" and a.report.converted:
                show.note(a.said())
        if start == 0:
            run.save(0, arms)
            lines = [{"step": 0, "policy": a.policy} for a in arms]
            evaluate(lines, 0)
            run.log(lines)
            show.step(0, lines)
        done, signal = advance(run, arms, range(start, p.steps), p.save_every, take, show)
        if done < p.steps:
            return Result(run.path, finished=False, step=done, signal=signal)
        return _finish(run, config, corpus, arms, show)
    finally:
        show.close()


def _finish(run: directory.Run, config: Config, corpus: data.Corpus, arms: list[Arm], show) -> Result:
    """The larger evaluation, the table and the report."""
    p = config.preset
    windows = corpus.windows(p.final_windows, p.shape.context)
    losses = {}
    for a in arms:
        show.note(f"final evaluation of {a.policy}: {len(windows[0])} windows")
        losses[a.policy] = a.evaluate(*windows, p.steps)
    means = {name: float(values.mean()) for name, values in losses.items()}
    run.log(
        [
            {"step": p.steps, "policy": name, "final_loss": mean if math.isfinite(mean) else None}
            for name, mean in means.items()
        ]
    )
    rows = result.table(arms, losses, directory.read_metrics(run.path))
    done = Result(run.path, finished=True, step=p.steps, rows=rows)
    directory.finish(run, done, partial(report.write, VIEW))
    return done


def _settings(config: Config):
    return directory.settings(config.threads, [torch.cuda.current_device()] if config.device == "cuda" else [])


def _build(config: Config) -> list[Arm]:
    device = torch.device(config.device)
    return [Arm(config.policy(name), config.preset, config.seed, device, config.stats) for name in config.policies]
