"""Verifiable tasks: text to learn a task from, prompts, and a reward that a program can compute.

    text(rng) → str                         what pretraining reads, with its share of wrong answers
    prompt(rng) → str                       what the model is to continue
    reward(prompt, completion) → float      0 to 1
    most, stop                              tokens (bytes) of a completion, the stop included; the byte that ends it

A task of your own is a class with these in a Python file (examples/reverse_task.py): `--task FILE.py`, or
`--task FILE.py:NAME` where it has several. Everything is a function of the generator that is handed in.

`load` runs that file. So it is called with what the user named, never with what a run's config.json names: that goes
through `agreed` first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
from pathlib import Path

import numpy as np

from fp4ext.errors import Refused

METHODS = ("text", "prompt", "reward")
NEEDED = (*METHODS, "most", "stop")


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


def check(name: str) -> str:
    """The name, if it can be one of a task: nothing is read or run. Raises Refused otherwise."""
    if not isinstance(name, str) or (name not in TASKS and not name.partition(":")[0].endswith(".py")):
        raise Refused(f"--task: unknown task {name!r}; accepted: {', '.join(TASKS)}, or FILE.py with a task in it")
    return name


def agreed(kept: str, given: str | None, run: Path, option: str = "--task ") -> str:
    """The name to `load` a run's task by.

    A run's directory may be anybody's, and its config.json is data. A task of fp4ext's own needs nothing more; a file
    is run only if the user names it too.

    Args:
        kept: what config.json names. given: what the user names, if anything. run: the run's directory.
        option: how a user names it.

    Raises:
        Refused: it is a file, and the user named none.
    """
    if given is not None:
        return absolute(check(given))
    if check(kept) not in TASKS:
        what = "its task is a file, and a file that a run's directory names is not run"
        raise Refused(f"{run}: {what}; accepted: {option}{kept}, where you trust that file")
    return kept


def load(name: str):
    """The task of that name, or of a file, which is run: "FILE.py" or "FILE.py:CLASS".

    Raises:
        Refused: no such task, no such file, a file without a task, or a task that lacks something.
    """
    if check(name) in TASKS:
        return TASKS[name]()
    path, _, wanted = name.partition(":")
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
        raise Refused(f"--task {name}: tasks in the file: {has}; accepted: one class with {', '.join(NEEDED)}")
    return _checked(name, found[wanted or next(iter(found))])


def _checked(name: str, kind: type):
    """A task of that class, once it has all that reinforcement will ask of it. Raises Refused otherwise."""

    def refuse(what: str, accepted: str):
        raise Refused(f"--task {name}: {kind.__name__}{what}; accepted: {accepted}") from None

    missing = [what for what in NEEDED if not hasattr(kind, what)]
    if missing:
        refuse(f" has no {', '.join(missing)}", f"a class with {', '.join(NEEDED)}")
    if type(kind.most) is not int or kind.most < 1:
        refuse(f".most is {kind.most!r}", "a whole number of tokens from 1, the stop included")
    if not isinstance(kind.stop, str) or len(kind.stop.encode()) != 1:
        refuse(f".stop is {kind.stop!r}", "a text of one byte, such as '\\n'")
    try:
        made = kind()
        prompt = made.prompt(generator(0))
        reward = made.reward(prompt, kind.stop) if isinstance(prompt, str) else 0.0
    except Exception as error:
        refuse(f" fails on a first prompt: {type(error).__name__}: {error}", "a task that runs")
    if not isinstance(prompt, str) or not prompt:
        refuse(f".prompt gives {prompt!r}", "a text that is not empty")
    try:
        bounded = 0 <= float(reward) <= 1
    except (TypeError, ValueError):
        bounded = False
    if not bounded:
        refuse(f".reward gives {reward!r}", "a number from 0 to 1")
    return made


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
