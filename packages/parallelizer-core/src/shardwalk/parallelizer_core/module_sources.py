"""The source of what modules run, parsed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=256)
def parsed_source(forward: Callable[..., Any]) -> ast.FunctionDef | None:
    """The parsed source of a function; None where it is not at hand."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
        parsed = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return parsed if isinstance(parsed, ast.FunctionDef) else None


def methods_of_forward(cls: type) -> Iterator[ast.FunctionDef]:
    """The forward of a class and the methods that it uses, parsed; those with source at hand."""
    todo, seen = ["forward"], {"forward"}
    while todo:
        method = inspect.getattr_static(cls, todo.pop(), None)
        parsed = parsed_source(method) if inspect.isfunction(method) else None
        if parsed is None or not parsed.args.args:
            continue
        yield parsed
        used = set(own_attributes(parsed)) - seen
        seen |= used
        todo += used


def own_attributes(method: ast.FunctionDef) -> Iterator[str]:
    """Every `name` of a `self.name` in a method, in the order of the source."""
    this = method.args.args[0].arg
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == this:
            yield node.attr
