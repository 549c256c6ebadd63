"""What all commands share: a parser with errors of one line, the way out, and the types of arguments."""

from __future__ import annotations

import argparse
import importlib
import math
import sys


class Parser(argparse.ArgumentParser):
    """argparse, with errors of one line."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        fail(f"{message} (see {self.prog} --help)")


class Command(Parser):
    """The parser of one command. Its file is imported, and adds the options, when the command is given.

    Args:
        file, verb: the module of fp4ext.cli with the functions add_<verb>(parser) and run_<verb>(args).
    """

    def __init__(self, file: str, verb: str, **kwargs):
        super().__init__(**kwargs)
        self.file, self.verb = file, verb

    def parse_known_args(self, args=None, namespace=None):
        try:
            from ..extras import train as _packages  # noqa: F401
        except ImportError as error:
            fail(f"{error}; the command line needs all: pip install 'fp4ext[all]'")
        module = importlib.import_module(f"fp4ext.cli.{self.file}")
        getattr(module, f"add_{self.verb}")(self)
        self.set_defaults(run=getattr(module, f"run_{self.verb}"))
        return super().parse_known_args(args, namespace)


def fail(message: str, code: int = 2):
    """One line on stderr, and out."""
    print(f"fp4ext: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def terminal():
    """Where tables and bars go."""
    from rich.console import Console

    return Console()


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def real(text: str) -> float:
    """Any number; what is accepted of them is for the verb to say."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a number") from None


def rate(text: str) -> float:
    value = real(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a number between 0 and 1")
    return value


def count(text: str) -> int:
    """A whole number from 1."""
    return whole(text, least=1)


def seed(text: str) -> int:
    """A whole number from 0."""
    return whole(text, least=0)


def whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a whole number from {least}")
    return value


def number(text: str) -> float:
    """10T → 1e13."""
    units = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
    try:
        value = float(text[:-1]) * units[text[-1]] if text and text[-1] in units else float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a number from 1, such as 300B or 10T")
    return value


def share(text: str) -> float:
    """1% → 0.01."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a share above 0, such as 1% or 0.01")
    return value


def numbers(text: str) -> tuple[float, ...]:
    """3,4 → (3.0, 4.0)."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: numbers such as 3,4") from None
