"""inspect: what a checkpoint holds, weight by weight, and what is wrong with it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..policy import formats
from . import naming
from .checkpoint import Checkpoint
from .errors import Invalid, shown
from .fp8 import Fp8
from .progress import Bar
from .stored import Stored

# Patterns of a config, and stars in one: trying them costs names × patterns × length^stars.
MAX_WILD, MAX_STARS = 256, 4
INPUTS = {"input_scale", "input_amax"}


@dataclass
class WeightRow:
    """A quantized weight, or several whose names differ in numbers alone.

    Attributes:
        weights, elements, bytes: how many, and how large with their companions.
        outer: the smallest and largest outer scale. scale: likewise of the block scales, zero blocks aside.
        zero: share of blocks whose values are all ±0. top: share of elements at the format's largest magnitude.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    weights: int = 0
    elements: int = 0
    bytes: int = 0
    outer: tuple[float, float] | None = None
    scale: tuple[float, float] | None = None
    zero: float = 0.0
    top: float = 0.0

    @property
    def bits(self) -> float:
        """Stored bits a weight, companions included."""
        return 8 * self.bytes / self.elements if self.elements else float("nan")


@dataclass
class Inspection:
    """What inspect found.

    Attributes:
        layout: the layout's name, "plain" where nothing is quantized.
        rows: the quantized weights. plain: name → (dtype, shape) of the others, numbers in names replaced by *.
        faults: what a reader would stumble over, weight by weight; empty where there is nothing.
    """

    path: Path
    layout: str
    shards: int
    bytes: int
    rows: list[WeightRow] = field(default_factory=list)
    plain: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def bits(self) -> float:
        """Stored bits a quantized weight, over all of them."""
        n = sum(row.elements for row in self.rows)
        return 8 * sum(row.bytes for row in self.rows) / n if n else float("nan")

    def __str__(self) -> str:
        packed = sum(row.weights for row in self.rows)
        head = f"{self.path}: layout {self.layout}, {self.shards} file{'s'[: self.shards != 1]}, {self.bytes:,} bytes"
        lines = [head]
        if self.rows:
            elements = sum(row.elements for row in self.rows)
            lines[0] += f"; {packed} quantized weights of {elements:,} elements at {self.bits:.2f} bits"
            table: list[tuple[str, ...]] = [
                ("weights", "format", "shape", "n", "bits", "outer scale", "block scales", "zero", "at max")
            ]
            for row in self.rows:
                outer = "–" if row.outer is None else _range(row.outer)
                scale = "–" if row.scale is None else _range(row.scale)
                shape = "×".join(map(str, row.shape))
                cells = (row.name, row.format, shape, str(row.weights), f"{row.bits:.2f}", outer, scale)
                table.append((*cells, f"{row.zero:.1%}", f"{row.top:.1%}"))
            lines += _aligned(table)
        if self.plain:
            lines += ["", f"plain ({sum(n for _, n, _ in self.plain.values())} tensors):"]
            lines += _aligned([(name, dtype, str(n), f"{size:,} B") for name, (dtype, n, size) in self.plain.items()])
        lines += ["", *(f"fault: {fault}" for fault in self.faults)] if self.faults else ["", "no faults"]
        return "\n".join(map(shown, lines))


def inspect(path: str | Path, progress: bool | None = None) -> Inspection:
    """Look through a checkpoint: layout, formats, bits, scales, faults. Weights are read one at a time.

    Raises:
        Refused: not a checkpoint that can be opened. What is wrong with single weights is in `faults`.
    """
    checkpoint = Checkpoint(path)
    folder = checkpoint.folder
    size = sum(slot.nbytes for slot in folder.slots.values())
    found = Inspection(Path(path), checkpoint.layout.name, len(folder.shards), size)
    rows: dict[tuple, WeightRow] = {}
    names: dict[tuple, str] = {}
    with Bar(size, progress) as bar:
        for name in sorted(checkpoint, key=naming.natural):
            fmt = checkpoint.format(name)
            if fmt is None and name not in checkpoint.fp8:
                _note_plain(found, checkpoint, name)
                continue
            pattern = _pattern(name)
            kind = pattern, "fp8" if fmt is None else fmt.name, checkpoint.shape(name)
            row = rows.setdefault(kind, WeightRow(*kind))
            names[kind] = name
            try:
                _add(row, checkpoint, name)
            except Invalid as error:
                found.faults.append(str(error).removeprefix(f"{folder.path}: "))
            bar.advance(checkpoint.nbytes(name), name)
    found.rows = list(rows.values())
    for row in found.rows:
        if row.weights == 1:
            row.name = names[row.name, "fp8" if row.format.startswith("fp8") else row.format, row.shape]
    found.faults += _config_faults(checkpoint)
    return found


def _add(row: WeightRow, checkpoint: Checkpoint, name: str) -> None:
    weight = checkpoint.weight(name)
    if isinstance(weight, Fp8):
        row.format = weight.kind
        row.top += (_fp8_at_max(weight) - row.top) / (row.weights + 1)
        row.weights, row.elements = row.weights + 1, row.elements + weight.shape.numel()
        row.bytes, row.scale = row.bytes + checkpoint.nbytes(name), _widen(row.scale, weight.scale.float())
        return
    assert isinstance(weight, Stored)
    scales = weight.q.scales.float()
    zero = _zero_blocks(weight)
    used = scales[~zero] if bool((~zero).any()) else scales[:0]
    elements = weight.q.shape.numel()
    total = row.elements + elements
    if total:
        row.zero += (zero.float().mean().item() - row.zero) * elements / total if zero.numel() else 0.0
        row.top += (_at_max(weight) - row.top) * elements / total
    row.weights, row.elements, row.bytes = row.weights + 1, total, row.bytes + checkpoint.nbytes(name)
    row.scale = _widen(row.scale, used)
    if weight.outer is not None:
        row.outer = _widen(row.outer, weight.outer.value)


def _zero_blocks(weight: Stored) -> Tensor:
    q = weight.q
    bytes_ = q.codes.view(torch.uint8).unflatten(-1, (-1, q.format.block // q.format.codes_per_byte))
    signs = 0x77 if q.format.codes_per_byte == 2 else 0x7F
    zero = ((bytes_ & signs) == 0).all(-1)
    return zero | (q.scales.view(torch.uint8) == 0) if q.format is formats.NVFP4 else zero


def _at_max(weight: Stored) -> float:
    q = weight.q
    data = q.codes.view(torch.uint8)
    if q.format.codes_per_byte == 2:
        return 0.5 * sum(((data >> shift) & 7 == 7).float().mean().item() for shift in (0, 4))
    return (q.codes.float().abs() == q.format.element.max).float().mean().item()


def _fp8_at_max(weight: Fp8) -> float:
    most = torch.finfo(weight.codes.dtype).max
    return (weight.codes.float().abs() == most).float().mean().item()


def _widen(range_: tuple[float, float] | None, values: Tensor) -> tuple[float, float] | None:
    if not values.numel():
        return range_
    low, high = values.min().item(), values.max().item()
    return (low, high) if range_ is None else (min(low, range_[0]), max(high, range_[1]))


def _note_plain(found: Inspection, checkpoint: Checkpoint, name: str) -> None:
    pattern, dtype = _pattern(name), str(checkpoint.dtype(name)).removeprefix("torch.")
    _, n, size = found.plain.get(pattern, (dtype, 0, 0))
    found.plain[pattern] = (dtype, n + 1, size + checkpoint.nbytes(name))


def _config_faults(checkpoint: Checkpoint) -> list[str]:
    """Where the config says otherwise than the tensors. A reader may believe either."""
    about, also = checkpoint.folder.quantization, checkpoint.folder.hf_quantization
    lists = [about.get("ignore"), about.get("modules_to_not_convert"), also.get("exclude_modules")]
    excluded = [p for found in lists if isinstance(found, list) for p in found if isinstance(p, str)]
    faults = []
    listed_by = _matcher(excluded)
    for name in checkpoint:
        quantized = checkpoint.format(name) is not None or name in checkpoint.fp8
        listed = listed_by(naming.module(name)) if quantized else None
        if listed is not None:
            faults.append(f"{name!r} is quantized, the config excludes it ({listed!r})")
    if (
        checkpoint.layout.name in ("compressed-tensors", "modelopt")
        and not about
        and not checkpoint.folder.quant_config
        and not checkpoint.folder.comfy
    ):
        faults.append("config.json has no quantization_config: readers will not know that weights are packed")
    inputs = {name: INPUTS & checkpoint.group(name).keys() for name in checkpoint if checkpoint.format(name)}
    missing = [name for name, has in inputs.items() if not has and checkpoint.format(name) is formats.NVFP4]
    if missing and any(inputs.values()):
        more = f" and {len(missing) - 1} more have" if len(missing) > 1 else " has"
        n = sum(map(bool, inputs.values()))
        faults.append(f"{missing[0]!r}{more} no input scale, {n} others have one: readers of W4A4 expect it")
    return faults


def _pattern(name: str) -> str:
    """The name with its numbers (layers, experts) as *."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _matcher(patterns: list[str]) -> Callable[[str], str | None]:
    """A function: module → the pattern that it fits, if any. A stranger's regular expressions ("re:…") are not run.

    Names without wildcards are looked up. Of the others, only the first MAX_WILD are tried.
    """
    exact = {p for p in patterns if not p.startswith("re:")}
    wild = [p for p in dict.fromkeys(patterns) if p in exact and any(c in p for c in "*?[")]
    few = [p for p in wild if p.count("*") <= MAX_STARS][:MAX_WILD]
    tries = [(p, re.compile(fnmatch.translate(p)).match) for p in few]

    def listed_by(module: str) -> str | None:
        if module in exact:
            return module
        return next((p for p, match in tries if match(module)), None)

    return listed_by


def _range(ends: tuple[float, float]) -> str:
    low, high = (f"{end:.3g}" for end in ends)
    return low if low == high else f"{low} … {high}"


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
