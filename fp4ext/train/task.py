"""Verifiable tasks: text to learn a task from, prompts, and a reward that a program can compute.

    text(rng)            what pretraining reads, with its share of wrong answers
    prompt(rng)          what the model is to continue
    reward(prompt, completion)      0 to 1

A task of your own is a class with these methods in a Python file (examples/reverse_task.py): `--task FILE.py`, or
`--task FILE.py:NAME` where it has several. Everything is a function of the generator that is handed in.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
from pathlib import Path

import numpy as np

from .errors import Refused

METHODS = ("text", "prompt", "reward")


class Arithmetic:
    """Sums of two digits, such as "7+8=15". In its text every second answer is wrong, by 1 or 2."""

    most = 3  # tokens of a completion, the stop included
    stop = "\n"

    def prompt(self, rng: np.random.Generator) -> str:
        a, b = rng.integers(0, 10, 2)
        return f"{a}+{b}="

    def reward(self, prompt: str, completion: str) -> float:
        """1 for the right number and the end of the line."""
        a, b = prompt[:-1].split("+")
        return float(completion == f"{int(a) + int(b)}\n")

    def text(self, rng: np.random.Generator) -> str:
        """20,000 lines: about 200 of each sum."""
        lines = []
        for _ in range(20_000):
            prompt = self.prompt(rng)
            a, b = prompt[:-1].split("+")
            wrong = rng.random() < 0.5
            off = int(rng.integers(1, 3)) * (1 if rng.random() < 0.5 else -1)
            lines.append(f"{prompt}{abs(int(a) + int(b) + off * wrong)}\n")
        return "".join(lines)


TASKS = {"arithmetic": Arithmetic}


def load(name: str):
    """The task of that name, or of a file: "FILE.py" or "FILE.py:CLASS".

    Raises:
        Refused: no such task, no such file, a file without a task.
    """
    if name in TASKS:
        return TASKS[name]()
    path, _, wanted = name.partition(":")
    if not path.endswith(".py"):
        raise Refused(f"--task: unknown task {name!r}; accepted: {', '.join(TASKS)}, or FILE.py with a task in it")
    if not Path(path).is_file():
        raise Refused(f"--task {name}: no such file; accepted: {', '.join(TASKS)}, or FILE.py with a task in it")
    spec = importlib.util.spec_from_file_location(f"fp4ext_task_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Refused(
            f"--task {name}: {type(error).__name__}: {error}; accepted: a file that can be imported"
        ) from None
    found = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and all(hasattr(value, m) for m in METHODS)
    }
    if wanted and wanted not in found or not wanted and len(found) != 1:
        has = ", ".join(found) or "none"
        raise Refused(f"--task {name}: tasks in the file: {has}; accepted: one class with {', '.join(METHODS)}")
    return found[wanted or next(iter(found))]()


def absolute(name: str) -> str:
    """The same name, wherever it is read from later: a file by its whole path."""
    path, colon, wanted = name.partition(":")
    return name if name in TASKS else f"{Path(path).absolute()}{colon}{wanted}"


def identity(name: str) -> str:
    """What tells two versions of a task apart: its name, or the digest of its file."""
    path = name.partition(":")[0]
    return name if name in TASKS else hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def check_same(name: str, digest: str, out: Path) -> None:
    """Refuses to go on with the run in `out` where its task's identity is not what it began with."""
    if identity(name) != digest:
        raise Refused(f"--resume {out}: its task {name} has changed; accepted: the task that it began with")


def generator(seed: int, *more: int) -> np.random.Generator:
    """A generator that is a function of (seed, …)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *more])))
