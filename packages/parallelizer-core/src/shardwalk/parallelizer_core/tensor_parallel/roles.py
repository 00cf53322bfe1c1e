"""Attention and feed-forward layers, recognized by the roles of the linear layers in them.

Nothing here knows a model. Heads are taken to lie one after the other
in the rows of a projection, and query head i to read key-value head i // (heads / kv heads).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from shardwalk.parallelizer_core.tensor_parallel.fused_layouts import FusedLayout, fused_layout
from shardwalk.parallelizer_core.tensor_parallel.role_names import (
    COLUMN_NAMES,
    FUSED_GATED_NAMES,
    FUSED_QUERY_KEY_VALUE_NAMES,
    FUSED_ROW_NAMES,
    KEY_NAMES,
    OUTPUT_NAMES,
    QUERY_NAMES,
    ROW_NAMES,
    VALUE_NAMES,
)


class MisfitError(Exception):
    """A module that the structural default does not know how to split.

    Attributes:
        path: the module's path in the model.
        why: what does not fit, without the way out.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The module that holds the projections of an attention, and their names in it.

    Attributes:
        path: the module's path in the model.
        names: the children for query, key, value and output, in that order; where one child makes
            the first three, it stands three times.
        fused: how that child's features hold them, else None.
        fused_widths: the features of query, key and value in it.
    """

    path: str
    module: nn.Module
    names: tuple[str, str, str, str]
    fused: FusedLayout | None = None
    fused_widths: tuple[int, int, int] = (0, 0, 0)

    def width(self, role: int) -> int:
        """The features of query, key or value (0, 1, 2), or those that the output (3) takes."""
        if self.fused and role < 3:
            return self.fused_widths[role]
        linear = getattr(self.module, self.names[role])
        return int(linear.in_features if role == 3 else linear.out_features)

    @property
    def hidden_size(self) -> int:
        """The width of what the queries are made of."""
        return int(getattr(self.module, self.names[0]).in_features)


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """The module that holds a feed-forward layer, gated or plain, and its linear layers' names.

    Attributes:
        path: the module's path in the model.
        columns: the one or two children that widen the hidden states.
        row: the child that narrows them again.
        fused: how the features of the one child hold gate and up, else None.
    """

    path: str
    module: nn.Module
    columns: tuple[str, ...]
    row: str
    fused: FusedLayout | None = None

    @property
    def hidden_size(self) -> int:
        """The width of its input."""
        return int(getattr(self.module, self.columns[0]).in_features)

    @property
    def inner_size(self) -> int:
        """The width between its layers."""
        return int(getattr(self.module, self.row).in_features)


def match_attention(path: str, module: nn.Module) -> Attention | None:
    """The attention whose projections are direct children of `module`, else None."""
    roles = (QUERY_NAMES, KEY_NAMES, VALUE_NAMES, OUTPUT_NAMES)
    found = [_linear_child(module, names) for names in roles]
    if any(name is None for name in found):
        return _match_fused_attention(path, module)
    query, key, value, output = (name for name in found if name is not None)
    return Attention(path=path, module=module, names=(query, key, value, output))


def match_feed_forward(path: str, module: nn.Module) -> FeedForward | None:
    """The feed-forward layer whose linear layers are direct children of `module`, else None."""
    fused = _match_fused_feed_forward(path, module)
    if fused is not None:
        return fused
    columns = tuple(name for name in COLUMN_NAMES if _is_plain_linear(module, name))
    row = _linear_child(module, ROW_NAMES)
    if not columns or row is None:
        return None
    return FeedForward(path=path, module=module, columns=columns, row=row)


def _match_fused_attention(path: str, module: nn.Module) -> Attention | None:
    """An attention in which one child makes query, key and value, as its source proves."""
    child = _linear_child(module, FUSED_QUERY_KEY_VALUE_NAMES)
    output = _linear_child(module, (*OUTPUT_NAMES, "c_proj"))
    layout = fused_layout(module, child) if child and output else None
    if child is None or output is None or layout is None:
        return None
    if layout.components:
        widths = layout.components
    else:
        whole, query = getattr(module, child).out_features, getattr(module, output).in_features
        widths = (query, (whole - query) // 2, (whole - query) // 2)
    if len(widths) != 3 or sum(widths) != getattr(module, child).out_features or min(widths) < 1:
        return None
    query, key, value = widths
    return Attention(
        path=path,
        module=module,
        names=(child, child, child, output),
        fused=layout,
        fused_widths=(query, key, value),
    )


def _match_fused_feed_forward(path: str, module: nn.Module) -> FeedForward | None:
    """A gated layer in which one child makes gate and up one after the other, by its source."""
    row = _linear_child(module, (*ROW_NAMES, *FUSED_ROW_NAMES))
    if row is None:
        return None
    inner = getattr(module, row).in_features
    for name in FUSED_GATED_NAMES:
        if not _is_plain_linear(module, name) or getattr(module, name).out_features != 2 * inner:
            continue
        layout = fused_layout(module, name)
        if layout is not None and layout.components == (inner, inner):
            return FeedForward(path=path, module=module, columns=(name,), row=row, fused=layout)
    return None


def check_feed_forward(found: FeedForward) -> None:
    """Raise MisfitError unless its layers have the widths of a feed-forward layer's.

    A layer of those widths whose features are taken apart is none.
    """
    row = getattr(found.module, found.row)
    if found.fused is not None:
        return  # matched by its widths
    for name in found.columns:
        column = getattr(found.module, name)
        if (column.in_features, column.out_features) != (row.out_features, row.in_features):
            raise MisfitError(
                f"{found.path}.{name}",
                f"it makes {column.out_features} features of {column.in_features}, while "
                f"{found.row} makes {row.out_features} of {row.in_features} (fused projections?)",
            )
        layout = fused_layout(found.module, name)
        if layout is not None and len(layout.components) > 1:
            raise MisfitError(
                f"{found.path}.{name}",
                f"its source takes its features apart in {layout.components}, and {found.row} "
                f"takes as many as it makes",
            )


def vector_size(module: nn.Module) -> int | None:
    """The size that all parameters of `module` have, if it has only 1-D ones of its own; else None.

    What holds further modules may give each of them another part of its input (a norm per head).
    """
    if any(True for _ in named_children_with_parameters(module)):
        return None
    shapes = {tuple(parameter.shape) for parameter in module.parameters(recurse=False)}
    if len(shapes) != 1:
        return None
    shape = shapes.pop()
    return shape[0] if len(shape) == 1 else None


def has_parameters(module: nn.Module) -> bool:
    """Whether there is a parameter in `module`, at any depth."""
    return any(True for _ in module.parameters())


def named_children_with_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The direct children that hold parameters, at any depth."""
    return ((name, child) for name, child in module.named_children() if has_parameters(child))


def _linear_child(module: nn.Module, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if _is_plain_linear(module, name)), None)


def _is_plain_linear(module: nn.Module, name: str) -> bool:
    child = dict(module.named_children()).get(name)
    return isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward
