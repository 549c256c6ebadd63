"""The house keeps its order: who may import whom, where torch and the device may be named, what has a name."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp4ext

ROOT = Path(__file__).parent.parent
PACKAGE, CSRC = ROOT / "fp4ext", ROOT / "csrc"

# A package imports only what stands on a line above its own. `fp4ext` is the public face.
ORDER = """
    errors extras files pages
    policy
    functional
    nn
    conversion
    fp4ext
    audit distributed export integrations rl
    train
    cli
    __main__
"""
LINES = [line.split() for line in ORDER.split("\n") if line.strip()]
PLACE = {name: place for place, names in enumerate(LINES) for name in names}
ASIDE = {"testing": {"functional", "policy"}, "reference": {"functional", "policy"}}


def dotted(path):
    """The module that a file is: ("nn", "dense") for fp4ext/nn/dense.py, ("nn",) for fp4ext/nn/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def package_of(path):
    """The package of a file, or the file's own name where it lies in fp4ext itself."""
    return (dotted(path) or ("fp4ext",))[0]


def modules():
    """Every module of fp4ext, as parts of its dotted name."""
    return {dotted(path) for path in PACKAGE.rglob("*.py")}


def imports(path, known=None):
    """The modules of fp4ext that a file imports, at its top or inside a function, as parts of their dotted names."""
    known = known or modules()
    package = ["fp4ext", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            found |= {(*base, alias.name) for alias in node.names}
    inside = {name[1:] for name in found if name[0] == "fp4ext"} - {("_C",)}
    return {name if name in known else name[:-1] for name in inside}


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    own = package_of(path)
    assert own in PLACE or own in ASIDE, f"{own} has no place in the order"
    for other in {(name or ("fp4ext",))[0] for name in imports(path)} - {own}:
        if own in ASIDE:
            assert other in ASIDE[own], f"{own} imports {other}"
        else:
            # The audit is a judge, as tests are: it undoes rotations with the reference's inverse.
            assert other != "reference" or own == "audit", f"{own} imports the reference, which only tests do"
            assert other in ("testing", "reference") or PLACE[other] < PLACE[own], (
                f"{own} imports {other}, which stands below it"
            )


def test_no_module_imports_itself_by_way_of_others():
    """Within a package too. A package's __init__ is its face, which no module of it imports."""
    known = modules()
    graph = {dotted(path): {n for n in imports(path, known) if n != dotted(path)} for path in FILES}
    faces = {dotted(path) for path in FILES if path.name == "__init__.py"}
    done, open_ = set(), []

    def walk(name):
        assert name not in open_, " -> ".join(".".join(n) for n in [*open_[open_.index(name) :], name])
        if name in done:
            return
        open_.append(name)
        for other in graph.get(name, ()):
            if not (other in faces and name[: len(other)] == other and other in open_):
                walk(other)
        open_.pop()
        done.add(name)

    for name in sorted(graph):
        walk(name)


def test_every_way_to_import_is_seen(tmp_path, monkeypatch):
    known = modules()
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "train").mkdir()
    source = tmp_path / "train" / "arm.py"
    source.write_text(
        "import torch, fp4ext.conversion\nfrom ..policy.policy import x\nfrom .run import y\n"
        "from ..functional import ops as o\ndef f():\n    from fp4ext import linear, Spec\n"
        "    from fp4ext.policy.spec import RHTS\n"
    )
    assert imports(source, known) == {
        ("conversion",),
        ("policy", "policy"),
        ("train", "run"),
        ("functional", "ops"),
        (),
        ("policy", "spec"),
    }


def test_no_module_hides_behind_a_function():
    """`import fp4ext.a.b` gives the module: no package has something else under the name of one of its modules."""
    for name in sorted(modules() - {()}):
        if name == ("__main__",) or name[-1] == "__main__" or name[0] == "integrations":
            continue
        module = importlib.import_module(".".join(("fp4ext", *name)))
        parent = importlib.import_module(".".join(("fp4ext", *name[:-1])))
        assert getattr(parent, name[-1]) is module, ".".join(name)


def public_callables():
    """Whatever the faces of fp4ext and of its packages offer that can be called."""
    for package in ("", ".policy", ".functional", ".nn", ".conversion", ".audit", ".distributed", ".export", ".train"):
        module = importlib.import_module(f"fp4ext{package}")
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing) and not (inspect.isclass(thing) and issubclass(thing, Exception)):
                yield f"{module.__name__}.{name}", thing


def test_every_public_signature_is_real():
    """A person who asks for the arguments learns their names."""
    for name, thing in public_callables():
        kinds = {p.kind for p in inspect.signature(thing).parameters.values()}
        assert not {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds, name


def test_dir_shows_the_public_face_alone():
    assert sorted(dir(fp4ext)) == sorted([*fp4ext.__all__, "__version__"])


# Tests: a folder of tests/ mirrors a package and a file a module. A file that tests a property of a whole package has
# its name here; one that tests the whole of fp4ext stands at the top of tests/.
FOLDERS = {"ops": "csrc/ops", "numerics": "csrc/numerics", "simt": "csrc/cuda", "gpu": "csrc/cuda"}
OF_A_PACKAGE = {
    "audit": "experts faults run",
    "conversion": "decision_walk",
    "distributed": "checkpoints",
    "export": "decision embeddings experts foreign fuzz hostile judges safety",
    "nn": "inference packed_training unbiased_products",
    "reference": "error_table scale_rules sharding stochastic torchao unbiased",
    "train": "cli compile crashes damage invariance strangers",
}


def test_tests_mirror_the_sources():
    known = modules()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        parts = path.relative_to(ROOT / "tests").with_suffix("").parts
        if len(parts) == 1:
            continue
        if parts[0] in FOLDERS:
            assert (ROOT / FOLDERS[parts[0]]).is_dir(), path
            continue
        module = parts[-1].removeprefix("test_")
        if module not in OF_A_PACKAGE.get(".".join(parts[:-1]), "").split():
            assert (*parts[:-1], module) in known, f"{path} mirrors no module"
    for folder, names in OF_A_PACKAGE.items():
        for name in names.split():
            assert (ROOT / "tests" / folder / f"test_{name}.py").exists(), name


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
    fakes_py = (PACKAGE / "functional" / "fakes.py").read_text()
    tests = (ROOT / "tests" / "functional" / "test_ops.py").read_text()
    names = schemas()
    assert {"quantize", "gemm", "unswizzle"} <= set(names)
    for name in names:
        wrapper = getattr(fp4ext.functional.ops, name)
        assert inspect.isfunction(wrapper) and wrapper.__doc__, name
        assert f'register_fake("fp4ext::{name}")' in fakes_py, name
        assert f'    "{name}": lambda:' in tests, f"tests/functional/test_ops.py has no sample of {name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fp4ext::{name}", "CPU"), name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_module_and_every_public_thing_is_documented(path):
    if path.stat().st_size == 0:
        return
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    if package_of(path) in ("train", "cli"):
        return
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            small = isinstance(node, ast.ClassDef) and all(isinstance(n, (ast.AnnAssign, ast.Expr)) for n in node.body)
            overload = any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
            assert ast.get_docstring(node) or small or overload, f"{path}: {node.name} has no docstring"


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
    """It loads neither the workloads, nor what judges, nor the packages of extras."""
    code = "import sys, fp4ext; print(*[m for m in sys.modules if m.startswith(('fp4ext.', 'rich', 'safe'))])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    packages = {name.split(".")[1] for name in loaded.split() if name.startswith("fp4ext.")}
    assert packages <= {"_C", "policy", "functional", "nn", "conversion", "errors", "files", "extras"}, packages
    assert not re.search(r"\b(rich|safetensors)\b", loaded)
