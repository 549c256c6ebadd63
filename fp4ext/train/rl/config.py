"""What an RL run is asked to do, checked before anything is computed. config.json is this, plus where it started."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

import fp4ext
from fp4ext.errors import Refused
from fp4ext.policy import policy_file

from .. import task
from ..models import cache
from ..pretraining.arm import policy_names
from ..pretraining.config import check_names, own_policy
from ..runs import typed
from ..runs.checkpoint import MOST
from ..runs.config import RUN
from ..runs.presets import whole
from . import arms

LEVELS = ("token", "sequence")  # of what the loss is a mean


@dataclass(frozen=True)
class Config:
    """How to reinforce. Equal configurations from equal weights give equal runs.

    Args:
        source: the run that pretraining left. None: one is made first, on the task's own text.
        arms: names from arms.py.
        task: a name or a file (task.py). None: what the source run learned.
        policy: whose 4 bits the arms use: a name, or a .toml or .json file; afterwards its name.
        steps, prompts, group: updates; prompts a step; completions of each.
        updates: minibatches a step, each an update of its own.
        lr, clip, kl_coef, level: see fp4ext.rl.Objective; level is its mean; the KL is to the weights at the start.
        temperature: of sampling and of the log-probs.
        kv_cache: "bf16", "mxfp8" or "nvfp4": what the sampler keeps keys and values in; the trainer rounds likewise.
        slots, rows: how many sequences the sampler and the trainer take at a time.
        eval_prompts: how many the reward before and after is measured on.
        own: name → what its file held, of a policy that does not ship; filled in. file: that file.

    Raises:
        Refused: an argument that cannot be used.
    """

    source: str | None = None
    arms: Sequence[str] = arms.DEFAULT
    task: str | None = None
    policy: str = "end_to_end"
    steps: int = 100
    prompts: int = 32
    group: int = 8
    updates: int = 2
    lr: float = 5e-4
    clip: float = 0.2
    kl_coef: float = 0.0
    level: str = "token"
    temperature: float = 1.0
    kv_cache: str = "bf16"
    seed: int = 0
    threads: int | None = None
    slots: int = 96
    rows: int = 128
    eval_prompts: int = 512
    save_every: int = 10
    own: dict[str, dict] = field(default_factory=dict)
    file: str | None = field(default=None, compare=False)

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen)
        put("arms", tuple(self.arms.split(",") if isinstance(self.arms, str) else self.arms))
        put("threads", torch.get_num_threads() if self.threads is None else self.threads)
        if not self.arms:
            raise Refused(f"--arms: none given; accepted: one or more of {', '.join(arms.NAMES)}")
        for i, name in enumerate(self.arms):
            if name not in arms.NAMES:
                raise Refused(f"--arms: unknown arm {name!r}; accepted: {', '.join(arms.NAMES)}")
            if name in self.arms[:i]:
                raise Refused(f"--arms: {name!r} is given twice; accepted: different arms")
        four_bit = [name for name in policy_names() if name != "bf16"]
        if self.policy.endswith(policy_file.SUFFIXES):
            loaded = own_policy("--policy", self.policy, policy_names())
            put("file", self.policy)
            put("own", {loaded.name: policy_file.to_dict(loaded)})
            put("policy", loaded.name)
        if self.policy not in (*four_bit, *self.own):
            raise Refused(f"--policy: {self.policy!r}; accepted: {', '.join(four_bit)}")
        for name in ("steps", "prompts", "updates", "slots", "rows", "eval_prompts", "save_every"):
            whole(f"--{name.replace('_', '-')}", getattr(self, name), most=MOST if name == "steps" else 2**31 - 1)
        whole("--group", self.group, 2)
        whole("--seed", self.seed, 0, 2**31 - 1)
        whole("--threads", self.threads, 1, 1024)
        for name, least in (("lr", 0.0), ("clip", 0.0), ("temperature", 0.0)):
            if not least < getattr(self, name) < float("inf"):
                raise Refused(f"--{name}: {getattr(self, name)}; accepted: a number above {least:g}")
        if not 0 <= self.kl_coef < float("inf"):
            raise Refused(f"--kl-coef: {self.kl_coef}; accepted: 0 or more")
        if self.kv_cache not in cache.FORMATS:
            raise Refused(f"--kv-cache: {self.kv_cache!r}; accepted: {', '.join(cache.FORMATS)}")
        if self.level not in LEVELS:
            raise Refused(f"--level: {self.level!r}; accepted: {', '.join(LEVELS)}")
        if self.source is not None:
            put("source", str(Path(self.source).absolute()))
        if self.task is not None:
            put("task", task.absolute(task.check(self.task)))

    @property
    def chosen(self) -> fp4ext.Policy:
        """The policy."""
        return policy_file.from_dict(self.own[self.policy]) if self.own else fp4ext.policies.get(self.policy)

    def as_dict(self) -> dict:
        """The part of config.json that two equal runs share."""
        values = asdict(self) | {"arms": list(self.arms)}
        del values["file"]
        if not self.own:
            del values["own"]
        return values

    @classmethod
    def from_dict(cls, values: dict) -> Config:
        """What config.json holds under "run". Raises Refused for what is no configuration, by its name."""
        values = typed.check(cls, values, RUN)
        check_names(values.get("policy"), values.get("own", {}))
        return typed.make(cls, values, RUN)


def command(config: Config) -> str:
    """The command that repeats a run."""
    words = ["python -m fp4ext rl"]
    for option in fields(Config):
        value = getattr(config, option.name)
        if option.name in ("own", "file"):
            continue
        if option.name == "threads" or (value != option.default and value is not None):
            text = ",".join(value) if option.name == "arms" else str(value)
            text = config.file or text if option.name == "policy" else text
            name = "from" if option.name == "source" else option.name.replace("_", "-")
            words.append(f"--{name} {shlex.quote(text)}")
    return " ".join(words)
