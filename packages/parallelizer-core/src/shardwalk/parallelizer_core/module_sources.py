"""The source of what modules run, parsed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
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
