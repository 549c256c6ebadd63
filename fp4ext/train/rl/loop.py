"""Reinforce one model under several arms, side by side, from the same weights on the same prompts.

    source     a pretrained run, or one made first on the task's own text (start/)
    each step  every arm: roll out, measure, update, refit; now and then a checkpoint of all arms
    at the end the reward again, the table, the report

A run that is stopped anywhere goes on bit for bit: what a step depends on is in the checkpoint or is a function of
(seed, step).
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

import fp4ext
from fp4ext.errors import Refused

from .. import task
from ..data import TASK, is_task
from ..pretraining import Result as Pretrained
from ..pretraining.config import Config as PretrainConfig
from ..pretraining.config import facts
from ..pretraining.loop import pretrain
from ..pretraining.loop import resume as resume_pretraining
from ..pretraining.view import VIEW as PRETRAINING
from ..runs import directory, presets, report
from ..runs.config import tell_changes
from ..runs.display import Silent
from ..runs.loop import advance
from ..runs.presets import Preset
from . import result
from .config import Config, command
from .learner import Learner
from .result import Result
from .view import VIEW

DEFAULT_TASK = "arithmetic"
START = "task"  # the preset of the pretraining that comes first where no run is given


def reinforce(config: Config, out: str | Path, show=None, tensorboard: bool = True) -> Result:
    """Reinforce the arms of `config` in a new directory.

    Args:
        config: from where, on what, how.
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
    begin = Start.read(config.source, config.policy) if config.source else None
    config = _with_task(config, begin)
    for sentence in config.chosen.row_variance_warnings():
        warnings.warn(sentence, stacklevel=2)
    settings = {
        "run": config.as_dict(),
        "data": {"task": config.task, "digest": task.identity(config.task)} | (begin.facts() if begin else {}),
        "facts": facts(PretrainConfig("task", policies=["bf16"])),
        "command": command(config),
    }
    with directory.create(out, settings) as run:
        return _go_on(run, config, begin, show, tensorboard)


def resume(out: str | Path, show=None, tensorboard: bool = True, task_file: str | None = None) -> Result:
    """Go on with the run in `out`, bit for bit as if it had never stopped.

    Args:
        task_file: the file that the run's task is in, which is run; needed where its task is a file's (task.agreed).
    """
    show, out = show or Silent(), Path(out)
    settings = directory.read_config(out)
    config = Config.from_dict(settings["run"])
    config = replace(config, task=task.agreed(config.task, task_file, out))
    task.check_same(config.task, settings["data"]["digest"], out)
    tell_changes(show, settings["facts"], facts(PretrainConfig("task", policies=["bf16"])))
    begin = Start.read(config.source, config.policy) if config.source else None
    if begin and begin.facts()["start"] != settings["data"]["start"]:
        raise Refused(f"--resume {out}: the weights in {config.source} have changed; accepted: those it began with")
    with directory.reopen(out) as run:
        return _go_on(run, config, begin, show, tensorboard)


class Start:
    """The weights that every arm starts from, and the run they are from."""

    def __init__(
        self, path: Path, policy: str, preset: Preset, weights: dict[str, Tensor], data: list[str], digest: str
    ):
        self.path, self.policy, self.shape, self.kind = path, policy, preset.shape, preset.model
        self.weights, self.data, self.digest = weights, data, digest

    @classmethod
    def read(cls, source: str | Path, policy: str = "end_to_end") -> Start:
        """Those of a pretraining run: of that policy's arm, else of end_to_end's, else of the first. Raises Refused if
        it is none."""
        path = Path(source)
        settings = directory.read_config(path)
        if "policies" not in settings["run"]:
            raise Refused(f"--from {path}: its config.json is not a pretraining run's; accepted: what `pretrain` left")
        config = PretrainConfig.from_dict(settings["run"], settings["data"]["paths"])
        manifest, files = directory.newest(path, settings)
        policy = next((name for name in (policy, "end_to_end") if name in config.policies), config.policies[0])
        name = f"{policy}.weights"
        if name not in files:
            raise Refused(f"--from {path}: its checkpoint has no {name}; accepted: the directory as the run left it")
        digest = manifest["files"][f"{name}.safetensors"]["blake2"]
        return cls(path, policy, config.preset, files[name], list(config.data), digest)

    def facts(self) -> dict:
        return {"start": {"run": str(self.path), "policy": self.policy, "weights": self.digest}}


def _with_task(config: Config, begin: Start | None) -> Config:
    """The configuration with its task settled: the one asked for, else what the source learned, else arithmetic."""
    learned = [p.removeprefix(TASK) for p in begin.data if is_task(p)] if begin else []
    name = config.task or (task.agreed(learned[0], None, begin.path) if learned else None if begin else DEFAULT_TASK)
    if name is None:
        tasks = ", ".join(task.TASKS)
        raise Refused(f"--from {begin.path}: pretrained on text, not on a task; accepted: --task {tasks} or FILE.py")
    if begin:
        if begin.kind != "transformer" and config.kv_cache != "bf16":
            raise Refused(f"--kv-cache {config.kv_cache}: {begin.kind} is sampled without a cache; accepted: bf16")
        check_fits(name, begin.shape.context, config.seed, f" by {begin.path}")
    else:
        check_fits(name, presets.get(START).shape.context, config.seed)
    return Config(**(config.as_dict() | {"task": name, "file": config.file}))


def check_fits(name: str, context: int, seed: int, where: str = "") -> None:
    """Raise Refused where a task's prompts and answers are longer than a model reads."""
    made = task.load(name)
    longest = max(len(made.prompt(task.generator(seed, i)).encode()) for i in range(100))
    if longest + made.most >= context:
        what = f"prompts of {longest} bytes and answers of {made.most}"
        raise Refused(f"--task {name}: {what}; accepted{where}: less than {context} together")


def _go_on(run: directory.Run, config: Config, begin: Start | None, show, tensorboard: bool) -> Result:
    if begin is None:
        begin = _pretrained(run.path / "start", config, show)
        if isinstance(begin, Result):
            return begin
    with directory.settings(config.threads):
        with directory.fitting(begin.path):
            learners = [Learner(name, config, begin.shape, begin.weights, begin.kind) for name in config.arms]
        start = run.load(learners)
        return _train(run, config, learners, start, show, tensorboard)


def _pretrained(path: Path, config: Config, show) -> Start | Result:
    """A start for a run that was given none: pretraining in 4 bits on the task's text, resumed where it was stopped."""
    settings = PretrainConfig(
        START,
        policies=[config.policy],
        own=dict(config.own),
        data=[TASK + config.task],
        seed=config.seed,
        threads=config.threads,
    )
    if not (path / "result.json").exists():
        show.note(f"no --from: pretraining a model on the text of {config.task} first, in {path}")
        bars = show.of(PRETRAINING)
        done = directory.carry_on(
            path,
            Pretrained.read,
            lambda p: resume_pretraining(p, bars, asked={"data": settings.data}),
            lambda p: pretrain(settings, p, bars),
        )
        if not done.finished:
            return Result(path.parent, finished=False, step=0, signal=done.signal)
    return Start.read(path, config.policy)


def _train(run: directory.Run, config: Config, learners: list[Learner], start: int, show, tensorboard: bool) -> Result:
    def evaluate(step: int) -> None:
        lines = [{"step": step, "arm": a.policy, "eval/reward": a.evaluate()} for a in learners]
        run.log(lines)
        show.step(step, lines)

    def take(step: int) -> list[dict]:
        lines = [a.step(step) for a in learners]
        run.log(lines)
        return lines

    if not tensorboard:
        run.without_tensorboard()
    try:
        show.start(learners, start, config.steps, run.path)
        if start == 0:
            run.save(0, learners)
            evaluate(0)
        done, signal = advance(run, learners, range(start, config.steps), config.save_every, take, show)
        if done < config.steps:
            return Result(run.path, finished=False, step=done, signal=signal)
        evaluate(config.steps)
    finally:
        show.close()
    bits = {a.policy: _weight_bits(a) for a in learners}
    rows = result.table(bits, directory.read_metrics(run.path))
    done = Result(run.path, finished=True, step=config.steps, rows=rows)
    directory.finish(run, done, partial(report.write, VIEW))
    return done


def _weight_bits(learner: Learner) -> float:
    """Bits an element of the layers that a policy converts, as the sampler holds them."""
    packed = fp4ext.packed_weights(learner.sampler.model)
    elements = sum(w.shape.numel() for w in packed)
    return 8 * sum(w.nbytes for w in packed) / elements if packed else 16.0
