"""What a module's source does with the result of calling one of its children."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwalk.parallelizer_core.module_sources import parsed_source


def readings(function: Callable[..., Any], child: str) -> list[CallResult | None]:
    """One for each time that `function` names the child; None where it does not call it."""
    parsed = parsed_source(inspect.unwrap(function))
    if parsed is None or not parsed.args.args:
        return []
    this = parsed.args.args[0].arg
    parents = {inner: node for node in ast.walk(parsed) for inner in ast.iter_child_nodes(node)}
    found: list[CallResult | None] = []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == f"{this}.{child}":
            call = parents[node]
            is_call = isinstance(call, ast.Call) and call.func is node and len(call.args) == 1
            found.append(CallResult(parsed, parents, call) if is_call else None)  # type: ignore[arg-type]
    return found


@dataclass
class CallResult:
    """A function in which a child is called, once, and what becomes of the result."""

    function: ast.FunctionDef
    parents: dict[ast.AST, ast.AST]
    call: ast.Call

    def uses(self) -> list[ast.expr] | None:
        """Where the result is read; None where it cannot be followed."""
        parent = self.parents.get(self.call)
        if not (isinstance(parent, ast.Assign) and len(parent.targets) == 1):
            return [self.call]
        target = parent.targets[0]
        if not isinstance(target, ast.Name):
            return None
        end = self._next_store(target.id, parent)
        return [
            node
            for node in ast.walk(self.function)
            if isinstance(node, ast.Name)
            and node.id == target.id
            and isinstance(node.ctx, ast.Load)
            and parent.lineno < node.lineno <= end
        ]

    def _next_store(self, name: str, after: ast.stmt) -> float:
        """The last line of the next statement that gives `name` another value."""
        ends = [
            self._statement(node).end_lineno or 0
            for node in ast.walk(self.function)
            if isinstance(node, ast.Name)
            and node.id == name
            and isinstance(node.ctx, ast.Store)
            and node.lineno > after.lineno
            and not self._are_alternatives(after, node)
        ]
        return min(ends, default=float("inf"))

    def _statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def _are_alternatives(self, first: ast.AST, other: ast.AST) -> bool:
        """Whether one stands in the body of an `if` and the other in its `else`."""
        branch: ast.AST = first
        while branch in self.parents:
            above = self.parents[branch]
            alternatives = (
                above.orelse if isinstance(above, ast.If) and branch in above.body else []
            )
            if any(other in ast.walk(node) for node in alternatives):
                return True
            branch = above
        return False

    def value_of(self, name: str) -> ast.expr | None:
        """What a name is assigned, if that happens once."""
        stores = [
            node
            for node in ast.walk(self.function)
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        ]
        if len(stores) != 1:
            return None
        statement = self.parents[stores[0]]
        return statement.value if isinstance(statement, ast.Assign) else None
