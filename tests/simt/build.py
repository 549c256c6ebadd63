"""Builds the library fp4ext_simt: csrc/cuda and the CUDA ops of csrc/ops, unmodified, with g++ for the SIMT machine.

Objects are kept under build/simt by the hash of everything they are made of, so that a second run compiles nothing, and
a mutant (test_mutants.py) compiles only what its edit reaches.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
OUT = ROOT / "build" / "simt"

# CUDA C++ has no strict aliasing, and the numerics contract no contraction.
FLAGS = "-std=c++20 -O1 -fPIC -ffp-contract=off -fno-strict-aliasing -fno-math-errno -Wall -Wno-unknown-pragmas".split()
DEFINES = ["-DFP4EXT_CUDA_LIBRARY=fp4ext_simt", "-DFP4EXT_CUDA_KEY=CPU", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL"]
# Each access of a kernel is a call of races.cpp, which stands in for the library that the compiler means.
WATCH = "-fno-thread-jumps -fsanitize=thread --param tsan-instrument-func-entry-exit=0".split()
# What runs for each access and each product.
FAST = ["-O3"]
# A vector load at an address that is no multiple of its size faults on a device, and does not on x86: here it traps.
TRAPS = "-fsanitize=alignment -fsanitize-undefined-trap-on-error".split()
SANITIZE = "-g1 -fsanitize=address,undefined -fno-sanitize=alignment -fno-sanitize-recover=undefined".split()


def sources() -> list[Path]:
    """What is compiled: every kernel, every CUDA op, the machine and the library."""
    kernels = sorted(path for path in (CSRC / "cuda").rglob("*") if path.suffix in (".cu", ".cpp"))
    return [*kernels, *sorted((CSRC / "ops").glob("*_cuda.cpp")), *sorted(HERE.glob("*.cpp"))]


def build(edits: dict[Path, str] | None = None, only: list[Path] | None = None, sanitize: bool = False) -> Path:
    """The path of the built library.

    edits: texts that stand in for those of source files, in what is compiled from `only` (None: everything). Those
    objects come first: of an inline function that several have, the linker takes the first.
    sanitize: with AddressSanitizer and UBSan.
    """
    edits = {path.resolve(): text for path, text in (edits or {}).items()}
    flags = FLAGS + (SANITIZE if sanitize else TRAPS)
    tree = _tree(edits)

    def compiled(path: Path) -> Path:
        reached = only is None or path in only
        watch = WATCH if not sanitize and path.is_relative_to(CSRC / "cuda") else []
        fast = FAST if path.parent == HERE and path.stem != "library" else []
        return _object(path, tree if reached else ROOT, edits if reached else {}, flags + watch + fast)

    # One process at a time compiles what many want; of the others, each mutant's files are its own.
    with _locked() if not edits else nullcontext(), ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sorted(sources(), key=lambda path: path not in (only or []))))
    library = OUT / f"{_hash(*map(str, objects), *flags)}.so"
    if not library.exists():
        libdir = Path(torch.__file__).parent / "lib"
        command = ["g++", "-shared", *flags, *map(str, objects), f"-L{libdir}", "-ltorch", "-ltorch_cpu", "-lc10"]
        _run([*command, "-o", _part(library)])
        os.replace(_part(library), library)
    return library


@contextmanager
def _locked() -> Iterator[None]:
    with open(OUT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def schemas() -> str:
    """The m.def(…) of csrc/ops/library.cpp."""
    return re.search(r"STABLE_TORCH_LIBRARY\(fp4ext, m\) \{(.*)\n\}", (CSRC / "ops" / "library.cpp").read_text(), re.S)[
        1
    ]


def _tree(edits: dict[Path, str]) -> Path:
    """The root under which the sources lie: the repository, or a copy with the edits."""
    (OUT / "include").mkdir(parents=True, exist_ok=True)
    generated = OUT / "include" / "schemas.inc"
    if not generated.exists() or generated.read_text() != schemas():
        generated.write_text(schemas())
    if not edits:
        return ROOT
    tree = OUT / "tree" / _hash(_sources_hash(), *(f"{path}{text}" for path, text in edits.items()))
    if not tree.exists():
        shutil.copytree(CSRC, tree / "csrc")
        shutil.copytree(HERE, tree / "tests" / "simt", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for path, text in edits.items():
            (tree / path.relative_to(ROOT)).write_text(text)
    return tree


@cache
def _sources_hash() -> str:
    """Of all that a copy of the sources holds: a copy of older ones would be another program."""
    files = [path for path in (*CSRC.rglob("*"), *HERE.iterdir()) if path.is_file() and path.suffix != ".py"]
    return _hash(*(f"{path.relative_to(ROOT)}\n{path.read_text()}" for path in sorted(files)))


def _object(path: Path, tree: Path, edits: dict[Path, str], flags: list[str]) -> Path:
    include = [f"-isystem{p}" for p in cpp_extension.include_paths()] + [f"-I{OUT / 'include'}"]
    out = OUT / f"{path.stem}.{_hash(*_texts(path, edits), schemas(), torch.__version__, *flags)}.o"
    if not out.exists():
        source = tree / path.relative_to(ROOT)
        command = ["g++", "-x", "c++", *flags, *DEFINES, f"-I{tree / 'tests/simt'}", *include, "-c", str(source)]
        _run([*command, "-o", _part(out)])
        os.replace(_part(out), out)
    return out


def _texts(path: Path, edits: dict[Path, str]) -> list[str]:
    """The text of a file and of all it includes by quotes, or from this folder."""
    seen, todo, texts = set(), [path.resolve()], []
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        text = edits.get(file) or file.read_text()
        texts.append(f"{file.relative_to(ROOT)}\n{text}")
        for name in re.findall(r'#include ["<]([^">]+)[">]', text):
            for candidate in ((file.parent / name).resolve(), HERE / name):
                if candidate.is_file() and candidate.is_relative_to(ROOT):
                    todo.append(candidate)
                    break
    return sorted(texts)


def _part(path: Path) -> str:
    """Where this thread writes what becomes `path`: another may be making the same."""
    return f"{path}.{os.getpid()}.{threading.get_ident()}.part"


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    print(build(sanitize="--sanitize" in sys.argv))
