"""The house keeps its order: who may import whom, where torch and the device may be named, what has a name."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import fp4ext

ROOT = Path(__file__).parent.parent
PACKAGE, CSRC = ROOT / "fp4ext", ROOT / "csrc"

# A module imports only what stands on a line above its own. `fp4ext` is the public face: everything up to backends.
ORDER = """
    pages files extras autograd
    formats
    spec
    fakes flops
    ops
    qtensor
    quantize cublas
    gemm attention
    grouped
    recipe
    layer_ops
    stages
    policy names uncalled
    activation policy_file
    policies
    linear
    experts
    stacked
    quantized
    packed
    noise
    decision described
    convert
    backends
    fp4ext
    audit export trainer
    train
    cli
    __main__
"""
ROOMS = [line.split() for line in ORDER.split("\n") if line.strip()]
PLACE = {name: place for place, names in enumerate(ROOMS) for name in names}
ASIDE = {"testing": {"formats", "spec", "ops"}, "reference": {"formats", "spec", "ops"}}


def room(path):
    """The room of a file: its module, or the folder it lies in."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "fp4ext" if parts == ("__init__",) else parts[0]


def imports(path):
    """The rooms of fp4ext that a file imports, at its top or inside a function."""
    package = ["fp4ext", *path.relative_to(PACKAGE).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names = [alias.name for alias in node.names] if base == ["fp4ext"] else [""]
            found += [[*base, name] for name in names]
    rooms = {name[1] if len(name) > 1 and name[1] else "fp4ext" for name in found if name[0] == "fp4ext"}
    known = PLACE.keys() | ASIDE.keys() | {"_C"}
    return {name if name in known else "fp4ext" for name in rooms}


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    own = room(path)
    assert own in PLACE or own in ASIDE, f"{own} has no place in the order"
    for other in imports(path) - {own, "_C"}:
        if own in ASIDE:
            assert other in ASIDE[own], f"{own} imports {other}"
        else:
            # The audit is a judge, as tests are: it undoes rotations with the reference's inverse.
            assert other != "reference" or own == "audit", f"{own} imports the reference, which only tests do"
            assert other in ("testing", "reference") or PLACE[other] < PLACE[own], (
                f"{own} imports {other}, to its right"
            )


def test_every_way_to_import_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "train").mkdir()
    source = tmp_path / "train" / "arm.py"
    source.write_text(
        "import torch, fp4ext.convert\nfrom ..policy import x\nfrom .run import y\nfrom .. import gemm as g\n"
        "def f():\n    from fp4ext import linear, Spec\n    from fp4ext.spec import RHTS\n"
    )
    assert imports(source) == {"convert", "policy", "train", "gemm", "linear", "fp4ext", "spec"}


# C++


def code_of(path):
    """Without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)


def sources(*folders):
    files = [path for folder in folders for path in sorted((CSRC / folder).rglob("*")) if path.is_file()]
    assert files
    return files


@pytest.mark.parametrize("folder", ["numerics", "cuda", "cpu"])
def test_no_torch_below_the_ops(folder):
    for path in sources(folder):
        assert not re.search(r"\btorch\b|\bATen\b|\bc10\b", code_of(path)), path


def test_numerics_stand_alone():
    """They include each other and the standard library; cuda and cpu include them, never ops."""
    for path in sources("numerics"):
        for include in re.findall(r'#include "([^"]+)"', path.read_text()):
            assert (path.parent / include).resolve().parent == CSRC.resolve() / "numerics", (path, include)
    for path in sources("cuda", "cpu"):
        for include in re.findall(r'#include "([^"]+)"', path.read_text()):
            assert "ops/" not in include, (path, include)


def test_the_device_is_named_in_two_places():
    for path in sources("."):
        inside = path.relative_to(CSRC).as_posix()
        code = code_of(path)
        if inside != "numerics/host_device.h" and not inside.startswith("cuda/ptx/"):
            assert "__CUDA_ARCH__" not in code, path
            # csrc/cpu may hold the compiler to an order of its own, with no instruction in it.
            code = code.replace('asm("" :', "") if inside.startswith("cpu/") else code
            assert not re.search(r"\b(__)?asm(__)?\b", code), path


def test_a_kernel_is_one_text_for_every_compiler():
    """What differs between nvcc and the SIMT machine stands in cuda/ptx/, instruction by instruction."""
    for path in sources("cuda"):
        if path.parent.name != "ptx":
            assert not re.search(r"^\s*#\s*(if|ifdef|ifndef)\b", code_of(path), re.M), path


# Names


def schemas():
    return re.findall(r'"(\w+)\(Tensor', (CSRC / "ops" / "library.cpp").read_text())


def test_every_op_has_a_wrapper_a_fake_and_an_opcheck():
    fakes_py = (PACKAGE / "fakes.py").read_text()
    tests = (ROOT / "tests" / "test_ops.py").read_text()
    names = schemas()
    assert {"quantize", "gemm", "unswizzle"} <= set(names)
    for name in names:
        wrapper = getattr(fp4ext.ops, name)
        assert inspect.isfunction(wrapper) and wrapper.__doc__, name
        assert f'register_fake("fp4ext::{name}")' in fakes_py, name
        assert f'    "{name}": lambda:' in tests, f"tests/test_ops.py has no sample of {name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fp4ext::{name}", "CPU"), name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_module_and_every_public_thing_is_documented(path):
    if path.stat().st_size == 0:
        return
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    if room(path) in ("train", "cli"):
        return
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            small = isinstance(node, ast.ClassDef) and all(isinstance(n, (ast.AnnAssign, ast.Expr)) for n in node.body)
            assert ast.get_docstring(node) or small, f"{path}: {node.name} has no docstring"


def test_the_public_face():
    """Every name of __all__ is there, is sorted, and a person can ask what it is."""
    assert fp4ext.__all__ == sorted(fp4ext.__all__)
    for name in fp4ext.__all__:
        thing = getattr(fp4ext, name)
        assert inspect.getdoc(thing), name
    wanted = {"quantize", "gemm", "Spec", "Recipe", "Policy", "policies", "Linear", "convert", "stage", "backends"}
    assert wanted <= set(fp4ext.__all__)
    assert importlib.import_module("fp4ext.reference") and "reference" not in fp4ext.__all__


def test_importing_the_package_is_light():
    """It pulls in neither the tests' room nor the workloads."""
    for path in PACKAGE.glob("*.py"):
        if room(path) != "__main__":
            assert not imports(path) & {"train", "testing", "reference"}, path
