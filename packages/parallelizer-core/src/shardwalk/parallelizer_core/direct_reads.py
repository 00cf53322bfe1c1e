"""Modules whose parameters others read themselves, beside or instead of calling them.

What gathers or splits the weights of a module does so around its own call; `conv1d(x,
self.conv.weight)` in its parent sees what lies there in between.
"""

from __future__ import annotations

import ast
from functools import lru_cache, reduce

from torch import nn

from shardwalk.parallelizer_core.module_sources import methods_of_forward
from shardwalk.parallelizer_core.parallel_state import class_of

_ABOUT = ("dtype", "device", "shape", "size", "ndim", "numel", "requires_grad", "is_meta")


def reads_parameters(module: nn.Module, child: str) -> bool:
    """Whether the forward of `module` reads a parameter of its child as `self.<child>.<name>`.

    Methods that it calls count, questions about a parameter (`self.conv.weight.dtype`) don't.
    False where the source is not at hand.
    """
    own = {name for name, _ in module.get_submodule(child).named_parameters(recurse=False)}
    return any(f"{child}.{name}" in _chains(class_of(module)) for name in own)


def modules_read_by_others(model: nn.Module) -> dict[nn.Module, str]:
    """Each module of which the forward of another one reads a parameter, and the path of that."""
    found: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        for chain in _chains(class_of(module)):
            *names, parameter = chain.split(".")
            owner = reduce(_child, names, module)
            if owner is not None and parameter in dict(owner.named_parameters(recurse=False)):
                found.setdefault(owner, path)
    return found


def _child(module: nn.Module | None, name: str) -> nn.Module | None:
    return None if module is None else dict(module.named_children()).get(name)


@lru_cache(maxsize=1024)
def _chains(cls: type) -> frozenset[str]:
    """`a.b` of each `self.a.b`, and so on, in the forward of a class and the methods it uses."""
    chains = (chain for parsed in methods_of_forward(cls) for chain in _chains_of_method(parsed))
    return frozenset(chain for chain in chains if "." in chain)


def _chains_of_method(parsed: ast.FunctionDef) -> set[str]:
    this = f"{parsed.args.args[0].arg}."
    attributes = [node for node in ast.walk(parsed) if isinstance(node, ast.Attribute)]
    asked = {id(node.value) for node in attributes if node.attr in _ABOUT}
    chains = (ast.unparse(node) for node in attributes if id(node) not in asked)
    return {chain.removeprefix(this) for chain in chains if chain.startswith(this)}
