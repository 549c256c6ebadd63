"""Checkpoints that are whole or not there.

    checkpoints/step-00000300/
        manifest.json                   step, sizes and digests of the files, what the caller adds
        bf16.weights.safetensors        the model's state_dict; loads strictly into a plain model
        bf16.optimizer.safetensors      AdamW's moments, by parameter name

All arms of a step are written into `.writing`, synced, and renamed together; only then is the previous step removed.
So a crash or a full disk at any moment leaves one complete step, the same one for every arm. No random state is kept:
every step draws its noise from (seed, step), see arm.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from .errors import Refused, Stopped

Files = dict[str, dict[str, Tensor]]  # "bf16.weights" -> name -> tensor


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
    with told(f"the checkpoint of step {step}", kept=latest(folder)):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            sizes = {}
            for name, tensors in files:
                data = safetensors.torch.save({key: t.detach().cpu().contiguous() for key, t in tensors.items()})
                write(aside / f"{name}.safetensors", data)
                sizes[f"{name}.safetensors"] = {"bytes": len(data), "blake2": _digest(data)}
            write(aside / "manifest.json", json.dumps({"step": step, "files": sizes, **facts}, indent=1).encode())
            _sync_folder(aside)
            os.rename(aside, target)
            _sync_folder(folder)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    for older in _steps(folder):
        if older != target:
            shutil.rmtree(older, ignore_errors=True)
    return target


def latest(folder: Path) -> Path | None:
    """The newest complete step, or None."""
    steps = _steps(folder)
    return steps[-1] if steps else None


def load(folder: Path, only: Collection[str] | None = None) -> tuple[dict, Files]:
    """Manifest and tensors of the newest step in `folder`; of the files `only`, by names such as "bf16.weights".

    Raises:
        Refused: there is none, or one of its files is missing, truncated or altered.
    """
    path = latest(folder)
    if path is None:
        raise Refused(f"{folder}: no checkpoint; accepted: a folder with a step-… in it, as a run leaves it")
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        expected = manifest["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path}: the checkpoint is damaged: manifest.json is missing or unreadable ({error})") from None
    files = {}
    for name, facts in expected:
        if only is not None and name.removesuffix(".safetensors") not in only:
            continue
        try:
            data = (path / name).read_bytes()
        except OSError as error:
            raise Refused(f"{path}: the checkpoint is damaged: {name} cannot be read ({error.strerror})") from None
        if len(data) != facts["bytes"]:
            raise Refused(f"{path}: the checkpoint is damaged: {name} has {len(data)} of its {facts['bytes']} bytes")
        if _digest(data) != facts["blake2"]:
            raise Refused(f"{path}: the checkpoint is damaged: {name} is not what was written (digests differ)")
        files[name.removesuffix(".safetensors")] = safetensors.torch.load(data)
    return manifest, files


def write(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Write a file aside and rename it: readers see the old one or the new one."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        write(aside, data)
        os.rename(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def told(what: str, kept: Path | None):
    """Turn an OSError while writing `what` into Stopped, which says what is intact."""
    try:
        yield
    except OSError as error:
        intact = f"intact: {kept}" if kept else "no checkpoint had been written before"
        raise Stopped(f"{what} could not be written: {error.strerror or error}; {intact}") from error


def _steps(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
