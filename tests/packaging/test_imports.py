"""What the sources import is what their package declares, and private torch has one place."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.packaging.packages import PACKAGES, ROOT, Package

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


# An import in one of these is no condition for importing the module that holds it.
GUARDS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try, ast.With)


def imports(tree: ast.AST, guarded: bool = False) -> Iterator[tuple[str, int, bool]]:
    """The absolute modules that a tree imports, with the line, and whether under a guard."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, guarded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, guarded
        yield from imports(node, guarded or isinstance(node, GUARDS))


def declared(package: Package) -> tuple[set[str], set[str]]:
    """The distributions that a package needs, and those of its extras."""

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in requirements}

    extras = package.project.get("optional-dependencies", {}).values()
    return names(package.project["dependencies"]), set().union(*map(names, extras))


@functools.cache
def installed() -> dict[str, set[str]]:
    """The distributions that provide each top-level module here."""
    return {
        top: {name.lower() for name in names} for top, names in packages_distributions().items()
    }


def distributions(module: str) -> set[str]:
    """The distributions that may provide an imported module."""
    top = module.partition(".")[0]
    if top == "shardwalk":
        return {p.distribution for p in PACKAGES if f"{module}.".startswith(f"{p.module}.")}
    return installed().get(top, {top})


@each_package
def test_every_import_is_declared(package: Package) -> None:
    needed, extra = declared(package)
    wrong = []
    for file, tree in package.trees():
        for module, line, guarded in imports(tree):
            allowed = needed | {package.distribution} | (extra if guarded else set())
            is_standard = module.partition(".")[0] in {*sys.stdlib_module_names, "__future__"}
            if not is_standard and not distributions(module) & allowed:
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {module}")
    assert wrong == []


@each_package
def test_every_requirement_is_used(package: Package) -> None:
    used = {
        name
        for _, tree in package.trees()
        for module, _, _ in imports(tree)
        for name in distributions(module)
    }
    assert declared(package)[0] - used == set()


def private_torch(tree: ast.AST) -> Iterator[int]:
    """The lines which reach for a private name of torch."""
    for module, line, _ in imports(tree):
        if re.match(r"torch\.(.*\.)?_(?!_)", module):
            yield line
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"torch\.(.*\.)?_(?!_)", ast.unparse(node)):
            yield node.lineno


def test_the_scan_sees_private_names() -> None:
    lines = """
import torch._C
from torch.distributed.fsdp._fully_shard import FSDPState
from torch.distributed.device_mesh import _mesh_resources
torch.distributed.tensor._utils.f()
torch.__version__
import torch.distributed.fsdp
"""
    assert sorted(set(private_torch(ast.parse(lines)))) == [2, 3, 4, 5]


def torch_compat(package: Package) -> list[Path]:
    """The one place for private torch: these files beside the package's __init__.py."""
    return list(package.source.glob("_torch_compat.py"))


@each_package
def test_private_torch_is_only_touched_in_torch_compat(package: Package) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}"
        for file, tree in package.trees()
        if file not in torch_compat(package)
        for line in private_torch(tree)
    ]
    assert wrong == []
