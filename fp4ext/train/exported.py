"""A run's weights as a 4-bit checkpoint, and the model again from that checkpoint alone.

    taken = of_run("runs/mine")              the newest weights of an arm, its policy, and what config.json should say
    export.save(taken.model, "out", "fp4ext", policy=taken.policy, config=taken.config)
    model = load("out")                      a packed Transformer, ready to sample from: fp4ext.train.sampler.Sampler

config.json of our own model holds its shape, its policy (whose sampler quantizes what the packed layers read) and the
format of its cache. That of a model of transformers is its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from fp4ext import Policy, export
from fp4ext.errors import Refused
from fp4ext.export import Checkpoint
from fp4ext.policy import policies, policy_file

from .models import build, cache, inkling2, products
from .models.transformer import Rope, Transformer
from .pretraining.config import Config
from .rl.arms import choose
from .rl.config import Config as RlConfig
from .runs import checkpoint, directory
from .runs.presets import Shape

MODEL_TYPE = "fp4ext_transformer"


@dataclass(frozen=True)
class Taken:
    """An arm of a run.

    Attributes:
        model: with its newest weights; plain, unless the arm samples in 4 bits: then as its sampler quantizes them.
        policy: whose 4 bits the arm has; None: BF16.
    """

    arm: str
    kind: str
    shape: Shape
    model: nn.Module
    policy: Policy | None
    kv_cache: str

    def config(self, policy: Policy | None) -> dict | None:
        """What config.json says of it, exported by a policy; None: what the model says itself."""
        if self.kind != "transformer":
            return None
        return {
            "model_type": MODEL_TYPE,
            "architectures": ["Transformer"],
            "shape": asdict(self.shape),
            "policy": policy and policy_file.to_dict(policy),
            "kv_cache": self.kv_cache,
        }


def of_run(path: str | Path, arm: str | None = None) -> Taken:
    """The newest weights of a run of `pretrain` or `rl`.

    Args:
        arm: default: `matched` of a run of `rl`; else the last one of the run's that was trained.

    Raises:
        Refused: it has saved nothing yet, or has no such arm.
    """
    path = Path(path)
    step = checkpoint.latest(path / "checkpoints")
    if step is None:
        raise Refused(f"{path}: no checkpoint in it yet; accepted: a run that has saved one")
    settings = directory.read_config(path)
    reinforced = "arms" in settings["run"]
    config = RlConfig.from_dict(settings["run"]) if reinforced else _pretraining(settings)
    there = [name for name in (config.arms if reinforced else config.policies) if _weights(step, name).exists()]
    arm = arm or ("matched" if "matched" in there else next(reversed(there), None))
    if arm not in there:
        raise Refused(f"--arm {arm}: not in {path}; accepted: {', '.join(there)}")
    kv_cache, pretrained = "bf16", path
    if reinforced:
        policy, kv_cache = choose(arm, config.chosen).sampler, config.kv_cache
        pretrained = Path(config.source) if config.source else path / "start"
        config = _pretraining(directory.read_config(pretrained))
    else:
        policy = config.policy(arm) if arm != "bf16" else None
    preset = config.preset
    weights = directory.newest(path, settings, only=[f"{arm}.weights"])[1][f"{arm}.weights"]
    with directory.fitting(path):
        model = build.of_weights(preset.model, preset.shape, weights, policy, kv_cache)
    if policy is None:  # plain layers, for whatever policy it is exported by
        for module in model.modules():
            if type(module) is products.InvariantLinear:
                module.__class__ = nn.Linear
    return Taken(arm, preset.model, preset.shape, model, policy, kv_cache)


def load(folder: str | Path) -> Transformer:
    """A model of ours from a checkpoint that holds one, its quantized layers packed.

    Raises:
        Refused: the checkpoint cannot be believed, or is of another model.
    """
    config = Checkpoint(folder).config
    if config.get("model_type") != MODEL_TYPE:
        what = f"model_type {config.get('model_type')!r} in its config.json"
        raise Refused(f"{folder}: {what}; accepted: {MODEL_TYPE}, as `export` of a run writes it")
    try:
        shape, said, kv = Shape(**config["shape"]), config["policy"], cache.FORMATS[config["kv_cache"]]
        policy = policy_file.from_dict(said) if said else policies.get("bf16")
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"{folder}: config.json is not as `export` wrote it ({error}); accepted: the same") from None
    with torch.device("meta"):
        model = Transformer(shape)
    model.rope = Rope(shape.head_dim, shape.context)
    export.load(folder, model, policy=policy, progress=False)
    products.serve_invariant(model)
    model.set_cache(kv)
    return model.eval()


def load_theirs(folder: str | Path) -> nn.Module:
    """transformers' Inkling2ForCausalLM from a checkpoint in the release's layout, by transformers' own loader; its
    experts are plain again. See inkling2.reading."""
    from transformers import AutoModelForCausalLM

    with inkling2.reading(), inkling2.silent():
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        ).eval()


def _pretraining(settings: dict) -> Config:
    return Config.from_dict(settings["run"], settings["data"].get("paths", ()))


def _weights(step: Path, arm: str) -> Path:
    return step / f"{arm}.weights.safetensors"
