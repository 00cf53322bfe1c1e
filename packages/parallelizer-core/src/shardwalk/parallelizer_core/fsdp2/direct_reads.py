"""Submodules whose parameters their parent reads itself, beside or instead of calling them."""

from __future__ import annotations

import ast
import inspect
from functools import lru_cache

from torch import nn

from shardwalk.parallelizer_core.parallel_state import class_of
from shardwalk.parallelizer_core.tensor_parallel.shared_inputs import parsed_source

_ABOUT = ("dtype", "device", "shape", "size", "ndim", "numel", "requires_grad", "is_meta")
_SETUP = ("__init__", "reset_parameters", "_init_weights", "extra_repr")


def reads_parameters(module: nn.Module, child: str) -> bool:
    """Whether a method of `module` reads a parameter of its child as `self.<child>.<name>`.

    A unit gathers its weights in its own forward, so such a child can't be one: in
    `conv1d(x, self.conv.weight)` nothing calls it. Methods that build or initialize don't count,
    nor do questions about a parameter (`self.conv.weight.dtype`). False where the source is not at
    hand.
    """
    own = {name for name, _ in module.get_submodule(child).named_parameters(recurse=False)}
    return any(child == read and name in own for read, name in _reads(class_of(module)))


@lru_cache(maxsize=512)
def _reads(cls: type) -> frozenset[tuple[str, str]]:
    """(attribute, attribute of it) of each `self.a.b` in the methods of a class and its bases."""
    found = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            continue
        methods = [f for n, f in vars(base).items() if inspect.isfunction(f) and n not in _SETUP]
        for parsed in filter(None, map(parsed_source, methods)):
            found |= _reads_of_method(parsed)
    return frozenset(found)


def _reads_of_method(parsed: ast.FunctionDef) -> set[tuple[str, str]]:
    this = parsed.args.args[0].arg if parsed.args.args else ""
    attributes = [node for node in ast.walk(parsed) if isinstance(node, ast.Attribute)]
    asked = {id(node.value) for node in attributes if node.attr in _ABOUT}
    return {
        (node.value.attr, node.attr)
        for node in attributes
        if id(node) not in asked
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == this
    }
