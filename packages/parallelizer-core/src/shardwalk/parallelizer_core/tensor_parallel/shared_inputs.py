"""Proofs, from a module's own source, of what becomes of the first argument of its forward."""

from __future__ import annotations

import ast
from collections.abc import Collection

from torch import nn

from shardwalk.parallelizer_core.module_sources import parsed_source

_SHAPE_WORDS = ("shape", "size", "dim", "ndim", "dtype", "device")


def hands_input_to_all(module: nn.Module, children: Collection[str]) -> bool:
    """Whether `forward` hands its first argument to each of these children and to nothing else.

    Only then may one collective before the module stand for one before each child: a residual
    inside the module, say, would otherwise be counted once per rank. False where the source is not
    at hand.
    """
    if "forward" in vars(module):
        return False
    function = parsed_source(type(module).forward)
    if function is None or len(function.args.args) < 2:
        return False
    name = function.args.args[1].arg
    calls = _calls_on_self(function, name)
    allowed = {id(call.args[0]) for call in calls if call.func.attr in children}
    allowed |= {
        id(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr in _SHAPE_WORDS
    }
    funcs = {id(call.func) for call in calls}
    others = [node for node in _self_attributes(function, children) if id(node) not in funcs]
    called = {call.func.attr for call in calls}
    return not others and set(children) <= called and _uses(function, name) <= allowed


def hands_input_to_parent_class(module: nn.Module) -> bool:
    """Whether `forward` hands its first argument to its parent class's and to nothing else."""
    if "forward" in vars(module):
        return False
    function = parsed_source(type(module).forward)
    if function is None or len(function.args.args) < 2:
        return False
    name = function.args.args[1].arg
    allowed = {
        id(node.args[0])
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "super().forward"
        and [ast.unparse(arg) for arg in node.args] == [name]
    }
    return bool(allowed) and _uses(function, name) <= allowed


class _SelfCall(ast.Call):
    func: ast.Attribute


def _calls_on_self(function: ast.FunctionDef, argument: str) -> list[_SelfCall]:
    """The calls `self.child(argument)` in a forward."""
    this = function.args.args[0].arg
    return [
        node  # type: ignore[misc]
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == this
        and not node.keywords
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Name)
        and node.args[0].id == argument
    ]


def _self_attributes(function: ast.FunctionDef, names: Collection[str]) -> list[ast.Attribute]:
    this = function.args.args[0].arg
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == this
    ]


def _uses(function: ast.FunctionDef, name: str) -> set[int]:
    return {
        id(node) for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name
    }
