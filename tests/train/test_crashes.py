"""A run's directory outlives its process, its disk's space and its machine's power, at every operation on a file.

As SQLite tests itself: the work is done once for each write, sync, renaming and removal in it, and that one fails.
"""

import json

import pytest
import torch

from fp4ext.train import Stopped, pretrain, resume
from fp4ext.train.pretraining import Result
from fp4ext.train.runs import directory as rundir
from fp4ext.train.runs import disk

from .faulty_disk import MODES, Death, FaultyDisk

CONFIG = {"run": {"seed": 3}, "data": {"digest": "0"}, "facts": {}, "command": "toy"}
STEPS = 3


class Toy:
    """An arm whose weights count its steps."""

    policy, diverged = "toy", None

    def __init__(self):
        self.weights = torch.zeros(5)

    def files(self):
        yield "toy.weights", {"w": self.weights}
        yield "toy.optimizer", {"m": 2 * self.weights}

    def load(self, files, diverged):
        self.weights, self.diverged = files["toy.weights"]["w"], diverged["toy"]


def work(out) -> None:
    """The loop of `pretrain`, and of `rl`, with nothing to compute: begun, or gone on with."""
    try:
        directory = rundir.reopen(out)
    except ValueError:
        directory = rundir.create(out, CONFIG)
    directory.without_tensorboard()
    arm = Toy()
    with directory:
        start = directory.load([arm])
        if start == 0:
            directory.save(0, [arm])
            directory.log([{"step": 0, "policy": "toy"}])
        for step in range(start + 1, STEPS + 1):
            arm.weights = arm.weights + 1
            directory.log([{"step": step, "policy": "toy", "train_loss": 1 / step}])
            directory.log([{"step": step, "policy": "toy", "valid_loss": 2 / step}])
            directory.save(step, [arm])
        directory.log([{"step": STEPS, "policy": "toy", "final_loss": 0.5}])
        rundir.read_metrics(out)
        report = lambda path, done: disk.replace(path / "report.html", b"the end")  # noqa: E731
        rundir.finish(directory, Result(out, True, STEPS), report)


def left(out) -> dict:
    """What a finished run has left, byte for byte."""
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def operations(tmp_path_factory, task) -> list[str]:
    folder = tmp_path_factory.mktemp("counted")
    with FaultyDisk(folder) as counted:
        task(folder / "run")
    return counted.operations


@pytest.mark.parametrize("mode", MODES)
def test_every_operation_fails_once(tmp_path_factory, mode):
    count = len(operations(tmp_path_factory, work))
    assert count > 60
    whole = tmp_path_factory.mktemp("whole") / "run"
    work(whole)
    for at in range(1, count + 1):
        folder = tmp_path_factory.mktemp("failing")
        with FaultyDisk(folder, at, mode) as failing:
            try:
                work(folder / "run")
            except (Stopped, ValueError, Death):
                pass
        where = f"{mode} at {at}, {failing.operations[at - 1]}"
        failing.restart()
        try:
            work(folder / "run")
        except BaseException as error:
            raise AssertionError(f"{where}: not gone on with: {error!r}") from error
        assert left(folder / "run") == left(whole), where


def test_what_is_done_is_on_the_disk(tmp_path):
    with FaultyDisk(tmp_path / "disk", mode="power") as failing:
        work(tmp_path / "disk" / "run")
        before = left(tmp_path / "disk" / "run")
    failing.restart()
    assert left(tmp_path / "disk" / "run").items() >= before.items()  # an older step may be there again


@pytest.mark.parametrize("mode", ["kill", "torn", "power"])
def test_a_finished_run_that_is_gone_on_with_can_be_read_at_every_moment(tmp_path, mode):
    """Whoever resumes it writes its end anew; metrics.jsonl and what vouches for it agree meanwhile."""
    whole = tmp_path / "whole"
    work(whole)
    lines, at, finished = rundir.read_metrics(whole), 0, False
    while not finished:
        at, folder = at + 1, tmp_path / str(at)
        with FaultyDisk(folder, mode=mode) as failing:
            copied(whole, folder / "run")
            failing.at = failing.count + at
            try:
                work(folder / "run")
                finished = True
            except Death:
                pass
        failing.restart()
        seen = rundir.read_metrics(folder / "run")
        assert seen == lines[: len(seen)] and len(seen) >= 2 * STEPS + 1, failing.operations[-1]
        work(folder / "run")
        assert left(folder / "run") == left(whole), failing.operations[-1]
    assert at > 8


def copied(source, target) -> None:
    """A copy that is on the disk."""
    for path in sorted(source.rglob("*")):
        to = target / path.relative_to(source)
        if path.is_file():
            disk.make_folder(to.parent)
            disk.write(to, path.read_bytes())
            disk.sync(to.parent)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["kill", "power"])
def test_every_operation_of_a_pretraining_fails_once(tmp_path_factory, micro, mode):
    config = micro(steps=2, save_every=1, eval_every=1, eval_windows=1, final_windows=1)

    def train(out):
        if (out / "config.json").exists():
            resume(out, tensorboard=False)
        else:
            pretrain(config, out, tensorboard=False)

    def seen(out):
        timed = ("report.html", "result.json", "metrics.jsonl", "manifest.json", "loss.png")
        lines = [{k: v for k, v in line.items() if k != "seconds"} for line in rundir.read_metrics(out)]
        return lines, {n: d for n, d in left(out).items() if not n.endswith(timed)}

    whole = tmp_path_factory.mktemp("whole") / "run"
    train(whole)
    for at in range(1, len(operations(tmp_path_factory, train)) + 1):
        folder = tmp_path_factory.mktemp("failing")
        with FaultyDisk(folder, at, mode) as failing, pytest.raises(Death):
            train(folder / "run")
        failing.restart()
        train(folder / "run")
        assert seen(folder / "run") == seen(whole), (at, failing.operations[-1])
        assert json.loads((folder / "run" / "result.json").read_text())["step"] == 2
