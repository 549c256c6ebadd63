"""Which submodules of a module are read without being called: `self.dt_proj.weight @ x` instead of `self.dt_proj(x)`.

A layer's own forward then has no say in what is computed, so it can be neither converted nor packed. The source of the
module's class tells: a read of `self.NAME.weight` in any method but those that build or initialise it. Reads of a
weight's dtype, device or shape, and tests of its type or presence, compute nothing and don't count.
"""

from __future__ import annotations

import ast
import functools
import sys

from torch import nn

_BUILDERS = ("__init__", "_init_weights", "reset_parameters", "_tie_weights", "tie_weights")
_ABOUT = ("dtype", "device", "shape", "ndim", "is_cuda", "requires_grad", "size", "dim", "numel")
_TESTS = ("isinstance", "hasattr", "getattr", "type")


def read_without_call(kind: type[nn.Module]) -> frozenset[str]:
    """Names of submodules ("dt_proj", "mlp.up") whose weight a class's methods read. Empty where it has no source."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):  # theirs call their layers, but for fast paths that convert reports
            break
        found |= _reads(base)
    return frozenset(found)


@functools.cache
def _reads(kind: type) -> frozenset[str]:
    """Those that the methods of one class read, its bases' not counted."""
    module = sys.modules.get(kind.__module__)
    body = _classes(getattr(module, "__file__", None) or "").get(kind.__qualname__, ())
    found: set[str] = set()
    for method in (n for n in body if isinstance(n, ast.FunctionDef) and n.name not in _BUILDERS):
        parents = {child: parent for parent in ast.walk(method) for child in ast.iter_child_nodes(parent)}
        for node in parents:
            if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.ctx, ast.Load):
                name = _below_self(node.value)
                if name and not _is_harmless(parents[node]):
                    found.add(name)
    return frozenset(found)


@functools.lru_cache(maxsize=64)
def _classes(file: str) -> dict[str, list[ast.stmt]]:
    """The bodies of the classes of a Python file by their qualified names."""
    found: dict[str, list[ast.stmt]] = {}

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[f"{prefix}{node.name}"] = node.body
                look(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                look(node.body, f"{prefix}{node.name}.<locals>.")

    try:
        with open(file, encoding="utf-8") as source:
            look(ast.parse(source.read()).body, "")
    except (OSError, SyntaxError, ValueError):
        return {}
    return found


def _below_self(node: ast.expr) -> str:
    """ "a.b" of the expression self.a.b, "" of another."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join(parts) if isinstance(node, ast.Name) and node.id == "self" else ""


def _is_harmless(parent: ast.AST) -> bool:
    """Whether what is done with a weight computes nothing with its values."""
    if isinstance(parent, ast.Attribute):
        return parent.attr in _ABOUT
    if isinstance(parent, ast.Call):
        return isinstance(parent.func, ast.Name) and parent.func.id in _TESTS
    return isinstance(parent, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops)
