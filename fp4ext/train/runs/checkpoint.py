"""Checkpoints that are whole or not there.

    checkpoints/step-00000300/
        manifest.json                   step, sizes and digests of the files, what the caller adds (digest.py)
        bf16.weights.safetensors        the model's state_dict; loads strictly into a plain model
        bf16.optimizer.safetensors      AdamW's moments, by parameter name

All arms of a step are written into `.writing`, synced, and renamed together; only then is the previous step removed.
So a crash or a full disk at any moment leaves one complete step, the same one for every arm. No random state is kept:
every step draws its noise from (seed, step), see arm.py. What has another name than a step's (a copy that somebody
keeps, say) is neither read nor removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fp4ext import files as small_files
from fp4ext.errors import Refused

from . import digest, disk

Files = dict[str, dict[str, Tensor]]  # "bf16.weights" -> name -> tensor
MANIFEST, SUFFIX = "manifest.json", ".safetensors"
MOST = 99_999_999  # steps: a folder's name has eight digits
STEP = re.compile(r"step-(\d{8})")
FILE = re.compile(r"[\w.-]+\.safetensors")


def files_of(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """What is kept of an arm, as (file name, tensors)."""
    yield f"{name}.weights", model.state_dict()
    state = {}
    for parameter, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            state[f"{parameter}.{key}"] = value
    yield f"{name}.optimizer", state


def take_over(files: Files, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put an arm's files back."""
    model.load_state_dict(files[f"{name}.weights"])
    parameters = dict(model.named_parameters())
    for key, value in files[f"{name}.optimizer"].items():
        parameter, _, moment = key.rpartition(".")
        p = parameters[parameter]
        optimizer.state[p][moment] = value.to(p.device)


def save(folder: Path, step: int, files: Iterable[tuple[str, dict[str, Tensor]]], facts: dict) -> Path:
    """Write a step and drop the older ones. `files` may be a generator: one file is in memory at a time.

    Raises:
        Stopped: the disk refused. The previous step is as it was.
    """
    target, aside = folder / f"step-{step:08d}", folder / ".writing"
    if target.exists():  # a resumed run that was stopped before it did anything
        return target
    with disk.told(f"the checkpoint of step {step}", kept=latest(folder)):
        try:
            _remove(aside, _own(aside))
            disk.make_folder(aside)
            sizes = {}
            for name, tensors in files:
                data = safetensors.torch.save({key: t.detach().cpu().contiguous() for key, t in tensors.items()})
                disk.write(aside / f"{name}{SUFFIX}", data)
                sizes[f"{name}{SUFFIX}"] = {"bytes": len(data), "blake2": digest.of(data)}
            disk.write(aside / MANIFEST, digest.dumps({"step": step, "files": sizes, **facts}))
            disk.sync(aside)
            os.rename(aside, target)
            disk.sync(folder)
        except OSError:
            with suppress(OSError):
                _remove(aside, _own(aside))
            raise
    drop_older(folder)
    return target


def drop_older(folder: Path) -> None:
    """Remove all steps but the newest. What `save` did not write stays."""
    for older in _steps(folder)[:-1]:
        with suppress(OSError, Refused):
            _remove(older, manifest(older)["files"])


def latest(folder: Path) -> Path | None:
    """The newest complete step, or None."""
    steps = _steps(folder)
    return steps[-1] if steps else None


def manifest(path: Path) -> dict:
    """What the manifest of a step's folder says. Raises Refused where it is missing, or not as it was written."""
    try:
        found = digest.read(path / MANIFEST)
        accepted = {"step": int, "files": dict, "metrics": dict, "config": str, "diverged": dict}
        for key, kind in accepted.items():
            if (key in found or key in ("step", "files")) and type(found.get(key)) is not kind:
                raise Refused(f"{MANIFEST}: {key} is {found.get(key)!r}; accepted: as it was written")
        if f"step-{found['step']:08d}" != path.name:
            raise Refused(f"{MANIFEST}: step is {found['step']}; accepted: the step that the folder is named after")
        sizes = found["files"] | ({"metrics": found["metrics"]} if "metrics" in found else {})
        for name, facts in sizes.items():
            if not FILE.fullmatch(name) and name != "metrics":
                raise Refused(f"{MANIFEST}: a file {name!r}; accepted: names of safetensors in the same folder")
            size, blake2 = (facts.get(key) for key in ("bytes", "blake2")) if isinstance(facts, dict) else (None, None)
            if type(size) is not int or size < 0 or not isinstance(blake2, str):
                raise Refused(f"{MANIFEST}: {name} has {facts!r}; accepted: bytes and blake2")
        for arm, step in found.get("diverged", {}).items():
            if step is not None and type(step) is not int:
                raise Refused(f"{MANIFEST}: diverged.{arm} is {step!r}; accepted: a step, or null")
    except Refused as error:
        raise Refused(f"{path}: the checkpoint is damaged: {str(error).removeprefix(f'{path}/')}") from None
    return found


def load(folder: Path, only: Collection[str] | None = None) -> tuple[dict, Files]:
    """Manifest and tensors of the newest step in `folder`; of the files `only`, by names such as "bf16.weights".

    Raises:
        Refused: there is none, or one of its files is missing, truncated or altered.
    """
    path = latest(folder)
    if path is None:
        raise Refused(f"{folder}: no checkpoint; accepted: a folder with a step-… in it, as a run leaves it")
    found, files = manifest(path), {}
    for name, facts in found["files"].items():
        if only is None or name.removesuffix(SUFFIX) in only:
            files[name.removesuffix(SUFFIX)] = _tensors(path, name, facts)
    missing = [name for name in only or () if name not in files]
    if missing:
        raise Refused(f"{path}: {MANIFEST} names no {', '.join(missing)}; accepted: the checkpoint as the run left it")
    return found, files


def _tensors(path: Path, name: str, facts: dict) -> dict[str, Tensor]:
    try:
        data = small_files.read(path / name, most=None)
    except OSError as error:
        raise Refused(f"{path}: the checkpoint is damaged: {name} cannot be read ({error.strerror})") from None
    if len(data) != facts["bytes"]:
        raise Refused(f"{path}: the checkpoint is damaged: {name} has {len(data)} of its {facts['bytes']} bytes")
    if digest.of(data) != facts["blake2"]:
        raise Refused(f"{path}: the checkpoint is damaged: {name} is not what was written (digests differ)")
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, KeyError) as error:
        raise Refused(f"{path}: the checkpoint is damaged: {name} holds no tensors ({error})") from None


def _steps(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if STEP.fullmatch(p.name) and p.is_dir() and not p.is_symlink())


def _own(aside: Path) -> list[str]:
    """Files of a step that was not finished."""
    return [path.name for path in aside.iterdir() if FILE.fullmatch(path.name)] if aside.is_dir() else []


def _remove(step: Path, files: Iterable[str]) -> None:
    """Remove these files of a step, then its manifest, and its folder if nobody has put anything else into it."""
    for name in (*files, MANIFEST):
        (step / name).unlink(missing_ok=True)
    with suppress(OSError):
        step.rmdir()
