"""What is published can be built, and a build says what it lacks and what it does."""

import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parent.parent


def test_the_source_distribution_has_all_that_a_build_reads(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("csrc", "cmake", "fp4ext"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    names = ("CMakeLists.txt", "LICENSE", "MANIFEST.in", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py")
    for name in names:
        shutil.copy(ROOT / name, tree)
    code = f"import setuptools.build_meta as b; print(b.build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        there = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    wanted = {p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.is_file() and "egg-info" not in p.as_posix()}
    assert wanted <= there, sorted(wanted - there)
    assert {"fp4ext/py.typed", "csrc/module.cpp", "cmake/cuda.cmake", "LICENSE"} <= there


@pytest.fixture
def build(monkeypatch):
    """setup.py's functions; its `setup` is not called."""
    monkeypatch.setattr(setuptools, "setup", lambda **given: None)
    return runpy.run_path(str(ROOT / "setup.py"))


def tool(path: Path, says: str) -> None:
    path.write_text(f"#!/bin/sh\necho {says}\n")
    path.chmod(0o755)


def test_an_old_cmake_is_the_first_thing_that_is_said(build, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cmake", None)
    monkeypatch.setattr(
        shutil, "which", lambda name, path=str(tmp_path / "cmake"): path if os.path.exists(path) else None
    )
    with pytest.raises(SystemExit, match=r"fp4ext: cmake is not here; accepted: cmake >= 3.28 \(pip install cmake\)"):
        build["cmake"]()
    for says, has in (("cmake version 3.25.1", "3.25"), ("cmake version 2.8", "2.8"), ("hello", "of no version")):
        tool(tmp_path / "cmake", says)
        with pytest.raises(SystemExit, match=f"{tmp_path}/cmake is cmake {has}.*; accepted: cmake >= 3.28"):
            build["cmake"]()
    for says in ("cmake version 3.28.0", "cmake version 4.4.5"):
        tool(tmp_path / "cmake", says)
        assert build["cmake"]() == str(tmp_path / "cmake")
    assert "cmake_minimum_required(VERSION 3.28)" in (ROOT / "CMakeLists.txt").read_text()


@pytest.mark.parametrize(
    ("chips", "option", "said"),
    [
        ([], "-DFP4EXT_DEVICES=", "all chips, as none is here"),
        ([(9, 0), (9, 0)], "-DFP4EXT_DEVICES=90", "the chips that are here (90)"),
        ([(12, 0), (8, 6)], "-DFP4EXT_DEVICES=120;86", "the chips that are here (120;86)"),
    ],
)
def test_a_cuda_build_says_what_it_compiles(build, monkeypatch, tmp_path, capsys, chips, option, said):
    import torch

    tool(tmp_path / "nvcc", "nvcc")
    monkeypatch.setenv("CUDACXX", str(tmp_path / "nvcc"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(chips))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: chips[i])
    assert build["devices"]([]) == [option]
    line = capsys.readouterr().err
    assert said in line and "CMAKE_ARGS=-DFP4EXT_DEVICES=90" in line and line.count("\n") == 1
    for chosen in ("-DFP4EXT_DEVICES=80", "-DFP4EXT_CUDA=OFF"):
        assert build["devices"]([chosen]) == []
    monkeypatch.setattr(torch.version, "cuda", None)
    assert build["devices"]([]) == [] and capsys.readouterr().err == ""


@pytest.mark.parametrize(("room", "package"), [("train", "numpy"), ("export", "safetensors"), ("audit", "rich")])
def test_a_missing_package_names_the_extra(room, package):
    """In a process where that package cannot be found."""
    code = f"""
import importlib.util, fp4ext
find = importlib.util.find_spec
import fp4ext.extras
fp4ext.extras.find_spec = lambda name: None if name == "{package}" else find(name)
try:
    fp4ext.{room}
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert f"needs {package}: pip install 'fp4ext[{room}]'" in said
