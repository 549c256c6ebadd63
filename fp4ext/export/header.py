"""The header of a safetensors file, read with suspicion.

    8 bytes    n, little-endian
    n bytes    JSON: name -> {"dtype", "shape", "data_offsets": [begin, end)}, and "__metadata__": str -> str
    the rest   the tensors' bytes, without holes or overlaps

Everything here comes from a stranger: nothing is believed before it is checked, nothing is allocated by a number that
the file names. The data itself is then read by the safetensors library.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import files
from .errors import Invalid

MAX_HEADER = 100_000_000  # bytes; the library's own limit
MAX_RANK = 8

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class Slot:
    """What a header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A checked header: the tensors in the file's order, and its metadata."""

    slots: dict[str, Slot]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """The header of a file, each word of it checked.

    Raises:
        Refused: not a regular file, truncated, or a header that does not describe the bytes that follow it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not hold us
    except OSError as error:
        raise Invalid(f"{path}: cannot be read ({error.strerror}); accepted: a safetensors file") from None
    with open(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise Invalid(f"{path}: not a regular file; accepted: a safetensors file")
        first = file.read(8)
        if first == b"version ":
            what = "a Git LFS pointer, not the file that it stands for"
            raise Invalid(f"{path}: {what}; accepted: a safetensors file (`git lfs pull` fetches it)")
        length = int.from_bytes(first, "little")
        if facts.st_size < 8 or length > min(MAX_HEADER, facts.st_size - 8):
            what = f"its header claims {length} bytes" if facts.st_size >= 8 else "it is too short for a header"
            raise Invalid(f"{path}: {what}, the file has {facts.st_size}; accepted: a whole safetensors file")
        entries = parse_json(file.read(length), path)
    if not isinstance(entries, dict):
        raise Invalid(f"{path}: its header is a {type(entries).__name__}; accepted: an object, name → tensor")
    metadata = entries.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Invalid(f"{path}: __metadata__ is not all text; accepted: an object of strings")
    for text in (*entries, *metadata, *metadata.values()):
        if not _is_unicode(text):
            raise Invalid(f"{path}: {_short(text)} holds half a surrogate pair; accepted: valid Unicode")
    slots = {name: _slot(path, name, entry) for name, entry in entries.items()}
    _check_cover(path, slots, facts.st_size - 8 - length)
    return Header(slots, metadata)


def parse_json(data: bytes, path: Path) -> Any:
    """files.parse_json of what a stranger's file holds.

    Raises:
        Refused: what is wrong, and in which file.
    """
    try:
        return files.parse_json(data)
    except ValueError as error:
        raise Invalid(f"{path}: not valid JSON ({error}); accepted: a JSON object") from None


def _slot(path: Path, name: str, entry: Any) -> Slot:
    def refuse(what: str, accepted: str) -> NoReturn:
        raise Invalid(f"{path}: tensor {_short(name)}: {what}; accepted: {accepted}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        refuse("its entry is not {dtype, shape, data_offsets}", "these three")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        refuse(f"dtype is {_short(entry['dtype'])}", ", ".join(DTYPES))
    dtype, shape, offsets = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_count, shape)):
        refuse(f"shape is {_short(shape)}", f"at most {MAX_RANK} whole numbers from 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_count, offsets)) or offsets[0] > offsets[1]:
        refuse(f"data_offsets is {_short(offsets)}", "[begin, end]")
    size = math.prod(shape) * dtype.itemsize
    if size != offsets[1] - offsets[0]:
        refuse(
            f"{entry['dtype']} {_short(shape)} takes {size} bytes, its offsets span {offsets[1] - offsets[0]}",
            "equal sizes",
        )
    return Slot(dtype, tuple(shape), *offsets)


def _check_cover(path: Path, slots: dict[str, Slot], size: int) -> None:
    """The tensors must fill the data without holes or overlaps: then nothing hides, and nothing is read twice."""
    at = 0
    for name, slot in sorted(slots.items(), key=lambda item: (item[1].begin, item[1].end)):
        if slot.begin != at:
            what = f"begins at byte {slot.begin}, where {at} follows the tensor before it"
            raise Invalid(f"{path}: tensor {_short(name)} {what}; accepted: data without holes or overlaps")
        at = slot.end
        if at > size:
            raise Invalid(f"{path}: tensor {_short(name)} ends at byte {at} of {size}; accepted: a file not cut short")
    if at != size:
        raise Invalid(f"{path}: {size - at} bytes after the last tensor; accepted: data without holes")


def _count(n: object) -> bool:
    return type(n) is int and 0 <= n < 2**53


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: object, most: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
