"""The stages, one after the other, each in a folder of its own, each resumed where it was stopped.

    pretrain/     a run of `pretrain`, all policies; done once its result.json is there
    rl/           a run of `rl` from one of them; likewise
    checkpoint/   the first arm's weights in 4 bits; whole or not there
    reload.json   what the same prompts became before and after; likewise
    config.json, times.json, result.json, report.html

What a stage leaves is all that the next one reads, so a run that is killed anywhere goes on with the stage it was in,
to the same bytes.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from fp4ext import export
from fp4ext.errors import Refused

from .. import exported, task
from ..models import inkling2
from ..pretraining import Result as Pretrained
from ..pretraining.config import facts
from ..pretraining.loop import pretrain
from ..pretraining.loop import resume as resume_pretraining
from ..rl import Result as Reinforced
from ..rl import loop as rl
from ..runs import checkpoint, digest, directory, disk
from ..runs.config import tell_changes
from ..runs.interrupt import Interrupts
from ..sampler import Completion, Request
from ..whole import sampler_of
from . import report
from .config import Config, command
from .display import Stages
from .result import STAGES, Exported, Reloaded, Result
from .words import outcome

PROMPTS = 2**33  # where the random streams of the last stage's prompts begin


def end_to_end(config: Config, out: str | Path, show: Stages | None = None, tensorboard: bool = True) -> Result:
    """Do the four stages in a new directory.

    Args:
        config: of which model, on what, how.
        out: the run directory; new or empty.
        show: a display (end_to_end/display.py); none: silent.
        tensorboard: also write TensorBoard events of the first two, if it is installed.

    Returns:
        Result, with `finished` False if a signal stopped it; `resume(out)` goes on.

    Raises:
        Refused: an input that cannot be used, before anything is computed or written.
        Stopped: the disk gave out; what was done is intact.
    """
    out = Path(out)
    rl.check_fits(config.task, config.preset.shape.context, config.seed)
    settings = {
        "run": config.as_dict(),
        "data": {"task": config.task, "digest": task.identity(config.task)},
        "facts": facts(config.pretraining()),
        "command": command(config),
    }
    directory.check_free(out, settings, "pretrain/checkpoints")
    try:
        disk.make_folder(out)
        directory.write_config(out, settings)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise Refused(f"--out {out}: {what}; accepted: a new or empty directory") from None
    return _go_on(out, config, show or Stages(), tensorboard)


def resume(
    out: str | Path, show: Stages | None = None, tensorboard: bool = True, task_file: str | None = None
) -> Result:
    """Go on with the run in `out`, bit for bit as if it had never stopped.

    Args:
        task_file: the file that the run's task is in, which is run; needed where its task is a file's (task.agreed).
    """
    out, show = Path(out), show or Stages()
    settings = directory.read_config(out)
    config = Config.from_dict(settings["run"])
    config = replace(config, task=task.agreed(config.task, task_file, out))
    task.check_same(config.task, settings["data"]["digest"], out)
    tell_changes(show, settings["facts"], facts(config.pretraining()))
    return _go_on(out, config, show, tensorboard)


def _go_on(out: Path, config: Config, show: Stages, tensorboard: bool) -> Result:
    lock = directory.locked(out)
    try:
        with directory.settings(config.threads):
            return _stages(out, config, show, tensorboard)
    finally:
        show.close()
        os.close(lock)


def _stages(out: Path, config: Config, show: Stages, tensorboard: bool) -> Result:
    found: dict = {}
    steps = (_pretrain, _rl, _export, _reload)
    show.start(STAGES, out)
    for number, (stage, work) in enumerate(zip(STAGES, steps, strict=True), 1):
        began = time.monotonic()
        show.begin(stage)
        # The jobs of the first two ask for signals themselves, between their steps.
        with nullcontext() if stage in ("pretrain", "rl") else Interrupts(show.note) as stop:
            try:
                found[stage] = work(out, config, show.display(stage), tensorboard)
            finally:
                seconds = _add_time(out, stage, time.monotonic() - began)
        if stop is None and not found[stage].finished:
            at = f"{found[stage].at} of stage {number}, {stage}"
            return Result(out, finished=False, at=at, signal=found[stage].signal)
        show.done(stage, outcome(stage, found[stage]), seconds[stage])
        if stop is not None and stop.signal and stage != STAGES[-1]:
            return Result(out, finished=False, at=f"stage {number}, {stage}", signal=stop.signal)
    done = Result(out, True, "the end", None, *found.values(), seconds=_times(out))
    with disk.told("the report", kept=out / "checkpoint"):
        report.write(out, done)
        disk.replace(out / "result.json", digest.dumps(done.to_json()))
    return done


def _pretrain(out: Path, config: Config, show, tensorboard: bool) -> Pretrained:
    return directory.carry_on(
        out / "pretrain",
        Pretrained.read,
        lambda path: resume_pretraining(path, show, tensorboard, asked={"data": config.pretraining().data}),
        lambda path: pretrain(config.pretraining(), path, show, tensorboard),
    )


def _rl(out: Path, config: Config, show, tensorboard: bool) -> Reinforced:
    return directory.carry_on(
        out / "rl",
        Reinforced.read,
        lambda path: rl.resume(path, show, tensorboard, task_file=config.task),
        lambda path: rl.reinforce(config.reinforcing(out / "pretrain"), path, show, tensorboard),
    )


def _export(out: Path, config: Config, show, tensorboard: bool) -> Exported:
    path = out / "checkpoint"
    if not path.exists():
        taken = exported.of_run(out / "rl", config.arms[0])
        kept = checkpoint.latest(out / "rl" / "checkpoints")
        quiet = nullcontext() if taken.kind == "transformer" else inkling2.silent()
        with quiet, disk.told(f"the checkpoint {path}", kept=kept):
            export.save(
                taken.model,
                path,
                config.layout,
                policy=taken.policy,
                config=taken.config(taken.policy),
                progress=False,
            )
    return Exported.read(path)


def _reload(out: Path, config: Config, show, tensorboard: bool) -> Reloaded:
    mark = out / "reload.json"
    if mark.exists():
        return Reloaded.read(mark)
    taken = exported.of_run(out / "rl", config.arms[0])
    requests = _requests(config, most=None if taken.kind == "transformer" else 16)
    sampled = sampler_of(taken.model).generate(requests)
    if taken.kind == "transformer":
        seen = _compare(sampled, sampler_of(exported.load(out / "checkpoint")).generate(requests), "fp4ext")
    else:
        # transformers decodes the experts when it loads them and rounds no activation: so does the model beside it.
        twin = inkling2.decoded(taken.shape, taken.model, taken.policy)
        before, after = (sampler_of(m) for m in (twin, exported.load_theirs(out / "checkpoint")))
        after = after.generate(requests)
        by = f"transformers {inkling2.version()}"
        seen = _compare(before.generate(requests), after, by, sampled)
    with disk.told("reload.json", kept=out / "checkpoint"):
        disk.replace(mark, digest.dumps(vars(seen)))
    return seen


def _requests(config: Config, most: int | None) -> list[Request]:
    """Prompts of the task, to be continued greedily to the end of the context, or by so many tokens."""
    made, rng = task.load(config.task), task.generator(config.seed, PROMPTS)
    prompts = [tuple(made.prompt(rng).encode()) for _ in range(64 if most is None else 16)]
    context = config.preset.shape.context
    return [Request(p, most=min(most or context, context - len(p)), temperature=0) for p in prompts]


def _compare(
    before: list[Completion], after: list[Completion], by: str, sampled: list[Completion] | None = None
) -> Reloaded:
    pairs = [
        pair
        for a, b in zip(before, after, strict=True)
        for pair in zip(a.tokens, b.tokens, a.logprobs, b.logprobs, strict=True)
    ]
    others = [
        (s, t) for a, b in zip(sampled or (), after, strict=False) for s, t in zip(a.tokens, b.tokens, strict=True)
    ]
    return Reloaded(
        prompts=len(before),
        tokens=len(pairs),
        tokens_equal=sum(a == b for a, b, _, _ in pairs),
        logprobs_equal=sum(a == b for _, _, a, b in pairs),
        largest=max(abs(a - b) for _, _, a, b in pairs),
        by=by,
        sampler_equal=sum(s == t for s, t in others) if sampled else None,
    )


def _times(out: Path) -> dict[str, float]:
    """Of each stage, in seconds. No more than a convenience: where the file is damaged, they begin anew."""
    with suppress(Refused):
        found = digest.read(out / "times.json")
        return {stage: found[stage] for stage in STAGES if isinstance(found.get(stage), float)}
    return {}


def _add_time(out: Path, stage: str, seconds: float) -> dict[str, float]:
    """Seconds of each stage, over all the processes that worked on it and were not killed."""
    times = _times(out)
    times[stage] = round(times.get(stage, 0.0) + seconds, 1)
    with suppress(OSError):
        disk.replace(out / "times.json", digest.dumps(times))
    return times
