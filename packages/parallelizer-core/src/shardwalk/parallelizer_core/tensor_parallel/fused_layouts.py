"""How one linear layer's features hold several components, proven from the source that reads them.

Two layouts are known: components one after the other (`chunk`, `split`, slices, or a view with the
components as a dimension), and units one after the other of which each holds a piece of every
component (a view whose last dimension is a unit). Anything else proves nothing.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwalk.parallelizer_core.tensor_parallel.call_results import CallResult, readings

_SHAPE_WORDS = ("shape", "size", "dtype", "device")
_LAST = (-1, 2)
# Counts are multiplied by it, to see whether sizes go with them.
_FACTOR = 3


@dataclass(frozen=True, kw_only=True)
class FusedLayout:
    """What the features of a linear layer hold.

    Attributes:
        components: the sizes of what lies one after the other; empty where units do.
        unit: the size of one unit, of which the layer holds a whole number; 0 where components lie
            one after the other.
        counts: the attributes, `config.` before those of the module's config, that the source takes
            for global counts.
    """

    components: tuple[int, ...] = ()
    unit: int = 0
    counts: tuple[str, ...] = ()


def fused_layout(owner: nn.Module, child: str) -> FusedLayout | None:
    """The layout of the linear layer `child` of `owner`; None where the source proves none."""
    linear = getattr(owner, child)
    if "forward" in vars(owner) or not isinstance(linear, nn.Linear):
        return None
    found = [source for method in _methods(type(owner)) for source in readings(method, child)]
    source = found[0] if len(found) == 1 else None
    return _layout(_Values(owner=owner, source=source), linear.out_features) if source else None


def is_width(name: str) -> bool:
    """Whether an attribute of that name holds the width of a head."""
    return name.endswith(("head_dim", "head_size", "dim_head", "d_head"))


def integer_at(owner: object, path: str) -> int | None:
    """The integer at an attribute path such as `config.num_heads`, else None."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner if isinstance(owner, int) and not isinstance(owner, bool) else None


def _methods(cls: type) -> Iterator[Callable[..., Any]]:
    seen: set[str] = set()
    for base in cls.__mro__:
        if base is nn.Module:
            return
        for name, value in vars(base).items():
            if inspect.isfunction(value) and name not in {*seen, "__init__"}:
                yield value
        seen |= vars(base).keys()


@dataclass(kw_only=True)
class _Values:
    """The integers that the source computes of the attributes of its module."""

    owner: nn.Module
    source: CallResult
    counts: dict[str, None] = field(default_factory=dict)

    def of(self, node: ast.expr, factor: int = 1) -> int | None:
        """The value of an expression, with every count in it multiplied by `factor`."""
        if isinstance(node, ast.Constant):
            return node.value if type(node.value) is int else None
        if isinstance(node, ast.Name):
            assigned = self.source.value_of(node.id)
            return None if assigned is None else self.of(assigned, factor)
        if isinstance(node, ast.Attribute):
            return self._attribute(ast.unparse(node), factor)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.of(node.operand, factor)
            return None if value is None else -value
        if isinstance(node, ast.BinOp):
            return _computed(node.op, self.of(node.left, factor), self.of(node.right, factor))
        return None

    def _attribute(self, text: str, factor: int) -> int | None:
        this, _, path = text.partition(".")
        if this != self.source.function.args.args[0].arg:
            return None
        value = integer_at(self.owner, path)
        if value is None or is_width(path):
            return value
        self.counts[path] = None
        return value * factor

    def grow(self, node: ast.expr) -> int | None:
        """The value of an expression that goes with the counts, else None."""
        value, grown = self.of(node), self.of(node, _FACTOR)
        return value if value is not None and grown == _FACTOR * value else None

    def items(self, node: ast.expr) -> list[ast.expr] | None:
        """The elements of a tuple or list, through names."""
        if isinstance(node, ast.Name):
            assigned = self.source.value_of(node.id)
            return None if assigned is None else self.items(assigned)
        return list(node.elts) if isinstance(node, ast.Tuple | ast.List) else None


def _computed(operator: ast.operator, left: int | None, right: int | None) -> int | None:
    if left is None or right is None:
        return None
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    is_division = isinstance(operator, ast.FloorDiv) and right
    return left // right if is_division else None


def _layout(values: _Values, features: int) -> FusedLayout | None:
    uses = values.source.uses()
    if not uses:
        return None
    parents = values.source.parents
    read = [use for use in uses if not _reads_shape(parents[use])]
    slices = [parents[use] for use in read if isinstance(parents[use], ast.Subscript)]
    if slices and len(slices) == len(read):
        components = _sliced(values, slices, features)
        return _concatenated(values, components, features)
    if len(read) != 1:
        return None
    called = _call_on(read[0], parents)
    if called is None:
        return None
    name, arguments, dim = called
    if name in ("view", "reshape"):
        return _viewed(values, arguments, features)
    if name not in ("chunk", "split") or dim not in _LAST or len(arguments) != 1:
        return None
    return _concatenated(values, _pieces(values, name, arguments[0], features), features)


def _concatenated(
    values: _Values, components: tuple[int, ...] | None, features: int
) -> FusedLayout | None:
    if not components or min(components) < 1 or sum(components) != features:
        return None
    return FusedLayout(components=components, counts=tuple(values.counts))


def _reads_shape(parent: ast.AST) -> bool:
    return isinstance(parent, ast.Attribute) and parent.attr in _SHAPE_WORDS


def _call_on(
    node: ast.expr, parents: dict[ast.AST, ast.AST]
) -> tuple[str, list[ast.expr], int | None] | None:
    """Name, arguments and `dim` of the method, or function of torch, that is called on `node`."""
    parent = parents[node]
    call = parents.get(parent) if isinstance(parent, ast.Attribute) else parent
    if not isinstance(call, ast.Call):
        return None
    if isinstance(parent, ast.Attribute):
        name, arguments = parent.attr, list(call.args)
    elif call.args and call.args[0] is node and ast.unparse(call.func).startswith("torch."):
        name, arguments = ast.unparse(call.func).removeprefix("torch."), list(call.args[1:])
    else:
        return None
    given = [keyword.value for keyword in call.keywords if keyword.arg in ("dim", "axis")]
    if name in ("chunk", "split"):
        given, arguments = given + arguments[1:], arguments[:1]
    try:
        return name, arguments, int(ast.literal_eval(given[0])) if given else None
    except (ValueError, TypeError):
        return None


def _pieces(
    values: _Values, name: str, argument: ast.expr, features: int
) -> tuple[int, ...] | None:
    if name == "chunk":
        count = values.of(argument)
        is_even = count and count > 0 and not features % count and not values.counts
        return (features // count,) * count if is_even and count else None
    items = values.items(argument)
    if items is None:
        size = values.grow(argument)
        return (size,) * (features // size) if size and size > 0 else None
    sizes = [values.grow(item) for item in items]
    return tuple(s for s in sizes if s is not None) if None not in sizes else None


def _sliced(values: _Values, slices: list[ast.AST], features: int) -> tuple[int, ...] | None:
    """The sizes of slices over the last dimension that lie one after the other."""
    bounds: list[tuple[int, int]] = []
    for node in slices:
        assert isinstance(node, ast.Subscript)
        index = node.slice
        is_last = isinstance(index, ast.Tuple) and ast.unparse(index.elts[0]) == "..."
        last = index.elts[-1] if isinstance(index, ast.Tuple) and len(index.elts) == 2 else None
        if not is_last or not isinstance(last, ast.Slice) or last.step is not None:
            return None
        start = 0 if last.lower is None else values.grow(last.lower)
        end = features if last.upper is None else values.grow(last.upper)
        if start is None or end is None:
            return None
        bounds.append((start, end))
    bounds.sort()
    starts = [start for start, _ in bounds]
    is_whole = starts == [0, *(end for _, end in bounds[:-1])] and bounds[-1][1] == features
    return tuple(end - start for start, end in bounds) if is_whole else None


def _viewed(values: _Values, arguments: list[ast.expr], features: int) -> FusedLayout | None:
    """The layout that a view names by its last dimensions.

    (components, heads, width) lie one after the other; (n, unit) and (heads, components, width) are
    units.
    """
    shape = values.items(arguments[0]) if len(arguments) == 1 else arguments
    if shape is None or len(shape) < 3:
        return None
    third, heads, width = shape[-3:]
    count = third.value if isinstance(third, ast.Constant) else None
    if type(count) is int and count > 1 and not features % count:
        is_local = _is_free_or_count(values, heads) and _is_free_or_width(values, width)
        return _concatenated(values, (features // count,) * count, features) if is_local else None
    pieces = heads.value if isinstance(heads, ast.Constant) else None
    is_in_units = type(pieces) is int and pieces > 1
    if not _is_free_or_count(values, third if is_in_units else heads):
        return None
    before = dict(values.counts)
    size = values.of(width)
    count = values.grow(heads)
    if size == -1 and not is_in_units and count and not features % count:
        size = features // count
    if size is None or size < 1 or values.counts != before:
        return None
    unit = size * pieces if is_in_units and isinstance(pieces, int) else size
    return None if features % unit else FusedLayout(unit=unit, counts=tuple(before))


def _is_free_or_count(values: _Values, node: ast.expr) -> bool:
    return values.of(node) == -1 or values.grow(node) is not None


def _is_free_or_width(values: _Values, node: ast.expr) -> bool:
    before = dict(values.counts)
    return values.of(node) is not None and values.counts == before
