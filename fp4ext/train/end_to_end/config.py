"""What the four stages are asked to do, checked before anything is computed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from fp4ext.errors import Refused

from .. import task
from ..data import TASK
from ..pretraining.config import Config as PretrainConfig
from ..pretraining.config import check_names
from ..rl import Config as RlConfig
from ..runs import presets, typed
from ..runs.config import RUN
from ..runs.presets import Preset


@dataclass(frozen=True)
class Config:
    """How to do all of it. Equal configurations give equal runs.

    Args:
        preset: model and schedule of pretraining: the name of one, or a Preset of your own.
        task: what is learned, from its text and then from its reward: a name or a file (task.py).
        policies: the arms of pretraining: names, or .toml or .json files; afterwards the names.
        policy: whose arm goes on, and whose 4 bits it samples in; one of them.
        arms: of RL; the first goes on.
        steps, rl_steps: of pretraining (None: the preset's) and of RL.
        lr, prompts, group: see rl.Config. None: that of the model's kind.
        layout: of the checkpoint. None: "fp4ext", of a model of transformers its release's.
        seed: of everything.
        threads: CPU threads; None: torch's choice.
        own, files: see PretrainConfig.

    Raises:
        Refused: an argument that cannot be used.
    """

    preset: Preset | str = "moe-task"
    task: str = "arithmetic"
    policies: Sequence[str] = ("bf16", "nvidia", "end_to_end")
    policy: str = "end_to_end"
    arms: Sequence[str] = ("matched", "mismatched")
    steps: int | None = None
    rl_steps: int = 100
    lr: float = 5e-4
    prompts: int = 32
    group: int = 8
    layout: str | None = None
    seed: int = 0
    threads: int | None = None
    own: dict[str, dict] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen)
        preset = presets.get(self.preset)
        put("preset", preset.with_(steps=self.steps) if self.steps else preset)
        put("steps", self.preset.steps)
        put("task", task.absolute(task.check(self.task)))
        before = self.pretraining()
        put("own", before.own)
        put("files", before.files)
        put("policies", before.policies)
        put("policy", next((name for name, path in self.files.items() if path == self.policy), self.policy))
        put("threads", before.threads)
        if self.policy not in self.policies:
            raise Refused(f"--policies {','.join(self.policies)}: {self.policy} is to go on; accepted: it among them")
        put("arms", self.reinforcing().arms)
        if self.arms[0] == "bf16":
            raise Refused("--arms bf16,…: the first goes on to a 4-bit checkpoint; accepted: one of 4 bits first")
        accepted = layouts(self.preset)
        put("layout", self.layout or accepted[0])
        if self.layout not in accepted:
            what = f"this model is not read back from {self.layout!r}"
            raise Refused(f"--layout: {what}; accepted: {', '.join(accepted)}")

    def pretraining(self) -> PretrainConfig:
        """The first stage."""
        return PretrainConfig(
            self.preset,
            policies=self.policies,
            own=dict(self.own),
            files=dict(self.files),
            data=[TASK + self.task],
            seed=self.seed,
            threads=self.threads,
        )

    def reinforcing(self, source: Path | None = None) -> RlConfig:
        """The second, from the run that the first left."""
        return RlConfig(
            source=source and str(source),
            task=self.task,
            policy=self.policy,
            own={name: held for name, held in self.own.items() if name == self.policy},
            arms=self.arms,
            steps=self.rl_steps,
            lr=self.lr,
            prompts=self.prompts,
            group=self.group,
            seed=self.seed,
            threads=self.threads,
        )

    def as_dict(self) -> dict:
        """The part of config.json that two equal runs share."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        del values["files"]
        if not self.own:
            del values["own"]
        return values | {
            "preset": presets.as_dict(self.preset),
            "policies": list(self.policies),
            "arms": list(self.arms),
        }

    @classmethod
    def from_dict(cls, values: dict) -> Config:
        """What config.json holds under "run". Raises Refused for what is no configuration, by its name."""
        values = typed.check(cls, values, RUN)
        check_names([*values.get("policies", ()), values.get("policy", "")], values.get("own", {}))
        return typed.make(cls, values, RUN, preset=presets.from_dict(values.get("preset"), f"{RUN}.preset"))


def layouts(preset: Preset) -> list[str]:
    """Those that the model of a preset is read back from, the default first: its experts are a stack."""
    if preset.model != "transformer":
        return [preset.model]
    return ["fp4ext"] if preset.shape.experts else ["fp4ext", "compressed-tensors", "modelopt"]


def command(config: Config) -> str:
    """The command that repeats a run, if its preset is one of ours with other steps."""
    base, p = Config.__dataclass_fields__, config.preset
    words = ["python -m fp4ext end-to-end", f"--{'preset' if p.model == 'transformer' else 'model'} {p.name}"]
    if p.steps != presets.PRESETS.get(p.name, p).steps:
        words.append(f"--steps {p.steps}")
    for name in ("task", "policies", "policy", "arms", "rl_steps", "lr", "prompts", "group", "seed"):
        value = getattr(config, name)
        if value != base[name].default:
            given = [config.files.get(n, n) for n in (value if isinstance(value, tuple) else [str(value)])]
            text = ",".join(given)
            words.append(f"--{name.replace('_', '-')} {shlex.quote(text)}")
    words += [f"--layout {config.layout}"] if config.layout != layouts(p)[0] else []
    return " ".join([*words, f"--threads {config.threads}"])
