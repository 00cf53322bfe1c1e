"""Attributes by which an attention puts its heads side by side again before its output layer."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import nn

from shardwalk.parallelizer_core.module_sources import methods_of_forward

_RESHAPES = ("view", "reshape")


def reshaped_widths(module: nn.Module, width: int) -> tuple[str, ...]:
    """The names of integer attributes of all heads' `width` that its forward reshapes to.

    In `heads.reshape(rows, length, self.embed_dim)` the attribute must be the width of the heads
    of one rank. One that the forward reads for something else too is left out.
    """
    reads = list(_reads(module))
    return tuple(
        name
        for name in dict.fromkeys(name for name, is_reshape in reads if is_reshape)
        if type(getattr(module, name, None)) is int
        and getattr(module, name) == width
        and all(is_reshape for other, is_reshape in reads if other == name)
    )


def reshape_to_input(module: nn.Module) -> str | None:
    """The first call that reshapes to the width of the forward's input; None for none.

    In `rows, length, width = x.shape` and later `heads.reshape(rows, length, width)`, `x` is whole
    and the heads are those of one rank.
    """
    for parsed in methods_of_forward(type(module)):
        given = {argument.arg for argument in parsed.args.args[1:]}
        widths = {name for node in ast.walk(parsed) for name in _unpacked_widths(node, given)}
        for call in ast.walk(parsed):
            if any(isinstance(size, ast.Name) and size.id in widths for size in _sizes(call)):
                return ast.unparse(call)
    return None


def _unpacked_widths(node: ast.AST, given: set[str]) -> list[str]:
    """The last of three or more names to which the shape of an argument is unpacked."""
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)):
        return []
    last = node.targets[0].elts[-1]
    value = node.value.func if isinstance(node.value, ast.Call) else node.value
    if not (isinstance(value, ast.Attribute) and value.attr in ("shape", "size")):
        return []
    is_given = isinstance(value.value, ast.Name) and value.value.id in given
    is_width = is_given and len(node.targets[0].elts) > 2
    return [last.id] if is_width and isinstance(last, ast.Name) else []


def _reads(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """Each attribute that the forward reads, and whether as an argument of a reshape."""
    for parsed in methods_of_forward(type(module)):
        this = parsed.args.args[0].arg
        sizes = {id(size) for call in ast.walk(parsed) for size in _sizes(call)}
        for node in ast.walk(parsed):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == this:
                yield node.attr, id(node) in sizes


def _sizes(node: ast.AST) -> list[ast.expr]:
    """The arguments of a call of `view` or `reshape`, those in one tuple too."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return []
    if node.func.attr not in _RESHAPES:
        return []
    tuples = [arg.elts for arg in node.args if isinstance(arg, ast.Tuple)]
    return [*node.args, *(size for sizes in tuples for size in sizes)]
