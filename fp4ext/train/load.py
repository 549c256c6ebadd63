"""What an audit needs of a run: the model as an arm left it, and batches of its text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fp4ext.errors import Refused

from . import data
from . import task as tasks
from .models.transformer import Transformer
from .pretraining.config import Config
from .runs import directory


@dataclass
class Loaded:
    """A run's model.

    Attributes:
        model: plain, with the weights of `arm`.
        batches: (tokens, targets) of training steps that the run has not taken.
        policies: the run's arms but bf16.
        amax_by_step: layer → [(step, largest |dy|)] from live statistics, if the run kept them.
    """

    model: Transformer
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    config: Config
    arm: str
    step: int
    amax_by_step: dict[str, list[tuple[int, float]]]

    @property
    def policies(self) -> list:
        return [self.config.policy(name) for name in self.config.policies if name != "bf16"]


def of_pretraining(path: str | Path) -> Path:
    """The directory of a pretraining run: that in an end-to-end run, or the path itself."""
    inside = Path(path) / "pretrain"
    return inside if (inside / "config.json").is_file() else Path(path)


def load(path: str | Path, batches: int = 2, arm: str | None = None, task: str | None = None) -> Loaded:
    """The model of a run directory, as its newest checkpoint has it.

    Args:
        batches: how many; each of the run's own size.
        arm: whose weights; default: bf16's, else the first arm's.
        task: the task that the run learned, where that is a file, which is run: see task.agreed.

    Raises:
        Refused: it is no run directory, has no checkpoint, or no such arm; its task is a file and `task` is not given.
    """
    path = of_pretraining(path)
    settings = directory.read_config(path)
    config = Config.from_dict(settings["run"], settings["data"]["paths"])
    arm = arm or ("bf16" if "bf16" in config.policies else config.policies[0])
    if arm not in config.policies:
        raise Refused(f"--arm: {arm!r} is no arm of {path}; accepted: {', '.join(config.policies)}")
    if config.preset.model != "transformer":
        raise Refused(f"{path}: a run of {config.preset.name}; accepted: one of a model of fp4ext's own")
    paths = [_agreed(name, task, path) for name in config.data]
    manifest, files = directory.newest(path, settings, only=[f"{arm}.weights"])
    model = Transformer(config.preset.shape)
    with directory.fitting(path):
        model.load_state_dict(files[f"{arm}.weights"])
    corpus = data.load(paths, config.preset.shape.context)
    p = config.preset
    steps = range(p.steps, p.steps + batches)
    made = [corpus.batch(config.seed, step, p.batch, p.shape.context) for step in steps]
    return Loaded(model, made, config, arm, manifest["step"], _amax(path, arm))


def _agreed(name: str, given: str | None, path: Path) -> str:
    return data.TASK + tasks.agreed(name.removeprefix(data.TASK), given, path) if data.is_task(name) else name


def _amax(path: Path, arm: str) -> dict[str, list[tuple[int, float]]]:
    lines = [line for line in directory.read_metrics(path) if "stats" in line]
    mine = [line for line in lines if line["policy"] == arm] or lines[:: max(1, len({x["policy"] for x in lines}))]
    series: dict[str, list[tuple[int, float]]] = {}
    for line in mine:
        for layer, roles in line["stats"].items():
            if roles.get("dy", {}).get("amax"):
                series.setdefault(layer, []).append((line["step"], roles["dy"]["amax"]))
    return series
