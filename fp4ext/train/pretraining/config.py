"""What a run is asked to do, checked before anything is computed.

config.json is this, plus the text's digest and the versions.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import fp4ext
from fp4ext.errors import Refused
from fp4ext.policy import policy_file

from .. import task
from ..data import TASK, is_task
from ..models import inkling2, products
from ..runs import presets, typed
from ..runs.config import RUN, compare
from ..runs.presets import Preset, whole
from . import arm

DEFAULT_POLICIES = ("bf16", "mxfp8", "nvidia", "end_to_end")  # those of them that this version has
# Values of a preset that the command line can change.
ADJUSTABLE = ("steps", "batch", "lr", "warmup", "eval_every", "save_every")


@dataclass(frozen=True)
class Config:
    """What to train. Equal configurations on equal text give equal runs.

    Args:
        preset: the name of one of presets.PRESETS, or a Preset of your own.
        policies: names from fp4ext.policies, or .toml or .json files of your own, each an arm; the gap is measured
            against "bf16". None: a choice that compares well. Afterwards: the names.
        data: files and folders of text, or the text of one task, "task:NAME" (task.py); none: the Python standard
            library's source.
        seed: of initial weights, batches and rounding.
        device: "cpu" or "cuda".
        threads: CPU threads; results may differ in bits between numbers of threads. None: torch's choice.
        stats: steps between live statistics of the quantizers; 0: none.
        own: name → what its file held, of the policies that do not ship; filled in.

    Raises:
        Refused: an argument that cannot be used.
    """

    preset: Preset | str = "tiny"
    policies: Sequence[str] | None = None
    data: Sequence[str] = ()
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    stats: int = 0
    own: dict[str, dict] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen)
        put("preset", presets.get(self.preset))
        if self.preset.model == "inkling2":
            inkling2.check()
        known = arm.policy_names()
        if self.policies is None:
            put("policies", tuple(p for p in DEFAULT_POLICIES if p in known))
        put("policies", tuple(self.policies.split(",") if isinstance(self.policies, str) else self.policies))
        put("policies", tuple(self._load(str(policy), known) for policy in self.policies))
        known = [*known, *self.own]
        if not self.policies:
            raise Refused(f"--policies: none given; accepted: one or more of {', '.join(known)}")
        for i, policy in enumerate(self.policies):
            if policy not in known:
                raise Refused(f"--policies: unknown policy {policy!r}; accepted: {', '.join(known)}")
            if policy in self.policies[:i]:
                raise Refused(f"--policies: {policy!r} is given twice; accepted: different policies")
        paths = (self.data,) if isinstance(self.data, str) else self.data
        put("data", tuple(map(_absolute, paths)))
        put("threads", torch.get_num_threads() if self.threads is None else self.threads)
        whole("--seed", self.seed, 0, 2**63 - 1)
        whole("--threads", self.threads, 1, 1024)
        whole("--stats", self.stats, 0)
        for path in filter(is_task, self.data):
            task.check(path.removeprefix(TASK))
        if self.device not in ("cpu", "cuda"):
            raise Refused(f"--device: {self.device!r}; accepted: cpu, cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise Refused("--device: 'cuda', but torch finds no CUDA device; accepted here: cpu")

    def _load(self, policy: str, known: Sequence[str]) -> str:
        """The name of a policy; that of a file is read."""
        if not policy.endswith(policy_file.SUFFIXES):
            return policy
        loaded = own_policy("--policies", policy, [*known, *self.own])
        self.own[loaded.name], self.files[loaded.name] = policy_file.to_dict(loaded), policy
        return loaded.name

    def policy(self, name: str) -> fp4ext.Policy:
        """The policy of an arm."""
        return policy_file.from_dict(self.own[name]) if name in self.own else fp4ext.policies.get(name)

    def as_dict(self) -> dict:
        """The part of config.json that two equal runs share."""
        more = ({"own": self.own} if self.own else {}) | ({"stats": self.stats} if self.stats else {})
        return more | {
            "preset": presets.as_dict(self.preset),
            "policies": list(self.policies),
            "seed": self.seed,
            "device": self.device,
            "threads": self.threads,
        }

    @classmethod
    def from_dict(cls, values: dict, data_paths: Sequence[str]) -> Config:
        """What config.json holds under "run". Raises Refused for what is no configuration, by its name."""
        values = typed.check(cls, values, RUN)
        check_names(values.get("policies"), values.get("own", {}))
        preset = presets.from_dict(values.get("preset"), f"{RUN}.preset")
        return typed.make(cls, values, RUN, preset=preset, data=data_paths)


def check_names(policies: Sequence[str] | str | None, own: dict[str, dict]) -> None:
    """Raise Refused unless these are policies as config.json has them: names, and what the files of some held."""
    for name in [policies] if isinstance(policies, str) else policies or ():
        if name.endswith(policy_file.SUFFIXES):
            raise Refused(f"{RUN}: {name!r} is a file; accepted: the name of a policy that ships or is under `own`")
    for name, held in own.items():
        try:
            found = policy_file.from_dict(held)
        except (TypeError, ValueError) as error:
            raise Refused(f"{RUN}.own.{name}: {error}") from None
        if found.name != name:
            raise Refused(f"{RUN}.own.{name}: a policy of the name {found.name!r}; accepted: its own name")


def own_policy(option: str, path: str, known: Sequence[str]) -> fp4ext.Policy:
    """The policy of a file that a person gave to an option.

    Raises:
        Refused: it is no policy file, or its name is among `known` or no name.
    """
    try:
        loaded = policy_file.load(path)
    except Refused as error:
        raise Refused(f"{option}: {error}") from None
    if loaded.name in known or not re.fullmatch(r"[\w.-]+", loaded.name):
        raise Refused(
            f"{option}: {path} names its policy {loaded.name!r}; accepted: a name of its own, of letters, digits, "
            f"'_', '-' and '.', and none of {', '.join(known)}"
        )
    return loaded


def facts(config: Config) -> dict:
    """What else may change bits: versions and the processor's instructions."""
    device = (
        torch.cuda.get_device_name()
        if config.device == "cuda"
        else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    )
    others = {"transformers": inkling2.version()} if config.preset.model == "inkling2" else {}
    return others | {
        "fp4ext": fp4ext.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "processor": device,
        "bf16_products": "native" if products.native(torch.device(config.device)) else "BF16 operands on fp32 units",
    }


def command(config: Config) -> str:
    """The command that repeats a run, if its preset is one of ours with other steps, batch or intervals."""
    p = config.preset
    words = [
        "python -m fp4ext pretrain",
        f"--{'preset' if p.model == 'transformer' else 'model'} {p.name}",
        f"--policies {','.join(config.files.get(name, name) for name in config.policies)}",
        f"--seed {config.seed}",
    ]
    base = presets.PRESETS.get(p.name, p)
    for name in ADJUSTABLE:
        if getattr(p, name) != getattr(base, name):
            words.append(f"--{name.replace('_', '-')} {getattr(p, name)}")
    words += [f"--threads {config.threads}"]
    words += [f"--device {config.device}"] if config.device != "cpu" else []
    words += [f"--stats {config.stats}"] if config.stats else []
    words += ["--data", *map(shlex.quote, config.data)] if config.data else []
    return " ".join(words)


def agree(config: Config, asked: dict) -> Config:
    """`config`, once what is asked for agrees with it; `data` may be the same text in another place.

    Args:
        asked: name -> value, by the names of Config and ADJUSTABLE; only what was asked for explicitly.

    Raises:
        Refused: a difference, with both values.
    """
    have = (
        config.as_dict()
        | {name: getattr(config.preset, name) for name in ADJUSTABLE}
        | {"preset": config.preset.name}
        | {"stats": config.stats}
    )
    new = {name: list(value) if isinstance(value, tuple) else value for name, value in asked.items() if name != "data"}
    differences = compare({name: have[name] for name in new}, new)
    if differences:
        raise Refused(f"the run has another configuration ({'; '.join(differences)}); accepted: --resume without them")
    return Config.from_dict(config.as_dict(), asked["data"]) if asked.get("data") else config


def _absolute(path: str | Path) -> str:
    if is_task(path):
        return TASK + task.absolute(str(path).removeprefix(TASK))
    return str(Path(path).absolute())
