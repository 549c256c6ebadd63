"""What the four stages found."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fp4ext.errors import Refused
from fp4ext.export import Checkpoint

from ..pretraining import Result as Pretrained
from ..rl import Result as Reinforced
from ..runs import digest

STAGES = ("pretrain", "rl", "export", "reload")


@dataclass(frozen=True)
class Exported:
    """A checkpoint.

    Attributes:
        formats: name of a format → how many of its weights are in it.
        plain: weights that are in none.
        bytes, bf16_bytes: of all its weights, and what they would take in BF16.
        packed_bytes, packed_elements: of those in a format, scales included.
        file_bytes: of its files on the disk.
    """

    layout: str
    formats: dict[str, int]
    plain: int
    bytes: int
    bf16_bytes: int
    packed_bytes: int
    packed_elements: int
    file_bytes: int

    @property
    def bits(self) -> float:
        """Bits an element of the weights in a format."""
        return 8 * self.packed_bytes / self.packed_elements

    @classmethod
    def read(cls, folder: Path) -> Exported:
        """What a folder holds, by its headers."""
        checkpoint, formats, plain, total, elements, packed, packed_elements = Checkpoint(folder), {}, 0, 0, 0, 0, 0
        for name in checkpoint:
            fmt, size, count = checkpoint.format(name), checkpoint.nbytes(name), 1
            for length in checkpoint.shape(name):
                count *= length
            total, elements = total + size, elements + count
            if fmt is None:
                plain += 1
                continue
            formats[fmt.name] = formats.get(fmt.name, 0) + 1
            packed, packed_elements = packed + size, packed_elements + count
        files = sum(os.path.getsize(path) for path in folder.iterdir())
        return cls(checkpoint.layout.name, formats, plain, total, 2 * elements, packed, packed_elements, files)


@dataclass(frozen=True)
class Reloaded:
    """Greedy continuations from a checkpoint, beside those of the weights that it was written from.

    Attributes:
        prompts: how many were continued.
        tokens, tokens_equal: of all continuations, and how many are the same, place by place.
        logprobs_equal: how many of their log-probs are the same number.
        largest: the largest difference of a log-prob, in nat.
        by: who read it.
        sampler_equal: tokens that the 4-bit sampler, which rounds what the layers read too, had at the same places; for
            a reader that does not.
    """

    prompts: int
    tokens: int
    tokens_equal: int
    logprobs_equal: int
    largest: float
    by: str
    sampler_equal: int | None = None

    @classmethod
    def read(cls, file: Path) -> Reloaded:
        """That of reload.json. Raises Refused where it is not as the run wrote it."""
        found = digest.read(file)
        try:
            return cls(**{key: value for key, value in found.items() if key not in digest.KEYS})
        except TypeError as error:
            raise Refused(f"{file}: not as this version of fp4ext writes it ({error}); accepted: that") from None

    @property
    def same(self) -> bool:
        return self.tokens_equal == self.tokens and self.logprobs_equal == self.tokens


@dataclass(frozen=True)
class Result:
    """A run's directory and outcome. If a `signal` stopped it: not `finished`, and `at` says where."""

    out: Path
    finished: bool
    at: str
    signal: int | None = None
    pretrained: Pretrained | None = None
    reinforced: Reinforced | None = None
    exported: Exported | None = None
    reloaded: Reloaded | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def report(self) -> Path:
        return self.out / "report.html"

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint"

    def to_json(self) -> dict:
        return {
            "pretrain": [asdict(row) for row in self.pretrained.rows],
            "rl": [asdict(row) for row in self.reinforced.rows],
            "export": asdict(self.exported),
            "reload": asdict(self.reloaded),
            "seconds": self.seconds,
        }
