"""Attention and feed-forward layers, recognized by the roles of the linear layers in them.

One table of names per role; nothing here knows a model. Heads are taken to lie one after the other
in the rows of a projection, and query head i to read key-value head i // (heads / kv heads).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

QUERY_NAMES = ("q_proj", "wq", "query", "q", "to_q", "query_proj", "q_linear")
KEY_NAMES = ("k_proj", "wk", "key", "k", "to_k", "key_proj", "k_linear")
VALUE_NAMES = ("v_proj", "wv", "value", "v", "to_v", "value_proj", "v_linear")
OUTPUT_NAMES = ("o_proj", "wo", "out_proj", "o", "to_out", "output_proj", "out", "proj", "dense")
HEAD_NORM_NAMES = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm",
                   "norm_q", "norm_k", "q_ln", "k_ln", "v_norm")  # fmt: skip
COLUMN_NAMES = ("gate_proj", "up_proj", "w1", "w3", "gate", "up", "fc1", "fc_in", "lin1", "linear1")
ROW_NAMES = ("down_proj", "w2", "down", "fc2", "fc_out", "lin2", "linear2")
HEAD_WIDTH_ATTRIBUTES = ("head_dim", "head_size", "dim_head", "d_head", "attention_head_size")
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "num_q_heads",
                "n_q_heads", "num_query_heads", "n_local_heads", "nhead", "nheads")  # fmt: skip
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads",
                    "n_local_kv_heads", "num_k_heads", "num_v_heads")  # fmt: skip


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
        names: the children for query, key, value and output, in that order.
    """

    path: str
    module: nn.Module
    names: tuple[str, str, str, str]

    def width(self, role: int) -> int:
        """The features of query, key or value (0, 1, 2), or those that the output (3) takes."""
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
    """

    path: str
    module: nn.Module
    columns: tuple[str, ...]
    row: str

    @property
    def hidden_size(self) -> int:
        """The width of its input."""
        return int(getattr(self.module, self.columns[0]).in_features)

    @property
    def inner_size(self) -> int:
        """The width between its layers."""
        return int(getattr(self.module, self.row).in_features)


@dataclass(frozen=True, kw_only=True)
class HeadCounts:
    """How many heads of which width the projections of an attention hold."""

    heads: int
    key_value_heads: int
    head_dim: int


def match_attention(path: str, module: nn.Module) -> Attention | None:
    """The attention whose projections are direct children of `module`, else None."""
    roles = (QUERY_NAMES, KEY_NAMES, VALUE_NAMES, OUTPUT_NAMES)
    found = [_linear_child(module, names) for names in roles]
    if any(name is None for name in found):
        return None
    query, key, value, output = (name for name in found if name is not None)
    return Attention(path=path, module=module, names=(query, key, value, output))


def match_feed_forward(path: str, module: nn.Module) -> FeedForward | None:
    """The feed-forward layer whose linear layers are direct children of `module`, else None."""
    columns = tuple(name for name in COLUMN_NAMES if _is_plain_linear(module, name))
    row = _linear_child(module, ROW_NAMES)
    if not columns or row is None:
        return None
    return FeedForward(path=path, module=module, columns=columns, row=row)


def check_feed_forward(found: FeedForward) -> None:
    """Raise MisfitError unless the widths of its layers are those of a feed-forward layer."""
    row = getattr(found.module, found.row)
    for name in found.columns:
        column = getattr(found.module, name)
        if (column.in_features, column.out_features) != (row.out_features, row.in_features):
            raise MisfitError(
                f"{found.path}.{name}",
                f"it makes {column.out_features} features of {column.in_features}, while "
                f"{found.row} makes {row.out_features} of {row.in_features} (fused projections?)",
            )


def head_counts(attention: Attention) -> HeadCounts:
    """The head counts that the projections imply.

    Raises:
        MisfitError: the head's width is known from nowhere, or does not agree with the widths of
            the projections or with the counts that the module or its config names.
    """
    query, key, value, output = (attention.width(role) for role in range(4))
    if output != query or key != value:
        raise MisfitError(
            attention.path,
            f"its projections are {query}, {key} and {value} wide and its output takes {output}; "
            f"queries must be as wide as the output's input, and keys as wide as values",
        )
    width = _head_width(attention)
    if width is None:
        raise MisfitError(
            attention.path,
            f"nothing says how wide a head is (an attribute such as {HEAD_WIDTH_ATTRIBUTES[0]}, or "
            f"{QUERY_COUNTS[0]}, of the module or its config)",
        )
    if query % width or key % width:
        raise MisfitError(
            attention.path, f"heads of {width} do not divide its projections of {query} and {key}"
        )
    counts = HeadCounts(heads=query // width, key_value_heads=key // width, head_dim=width)
    _check_config(attention, counts)
    return counts


def count_attributes(attention: Attention, counts: HeadCounts) -> tuple[str, ...]:
    """The names of the module's own attributes that hold its number of heads.

    Raises:
        MisfitError: one of them holds another number than the projections imply.
    """
    found: list[str] = []
    for names, count in (
        (QUERY_COUNTS, counts.heads),
        (KEY_VALUE_COUNTS, counts.key_value_heads),
    ):
        for name in names:
            value = _integer(attention.module, name)
            if value is not None and value != count:
                raise MisfitError(
                    attention.path,
                    f"{name}={value}, while its projections hold {count} heads of "
                    f"{counts.head_dim}",
                )
            if value is not None:
                found.append(name)
    return tuple(found)


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


def _head_width(attention: Attention) -> int | None:
    for name in HEAD_WIDTH_ATTRIBUTES:
        width = _integer(attention.module, name)
        if width is not None:
            return width
    for owner in (attention.module, getattr(attention.module, "config", None)):
        for name in QUERY_COUNTS:
            count = _integer(owner, name)
            if count is not None and not attention.width(0) % count:
                return attention.width(0) // count
    return None


def _check_config(attention: Attention, counts: HeadCounts) -> None:
    stated = _integer(getattr(attention.module, "config", None), "num_attention_heads")
    if stated is not None and stated != counts.heads:
        raise MisfitError(
            f"{attention.path}.{attention.names[0]}",
            f"it holds {counts.heads} heads of {counts.head_dim}, while num_attention_heads is "
            f"{stated}",
        )


def _integer(owner: object, name: str) -> int | None:
    """A plain integer attribute; what a property computes cannot be set to one rank's count."""
    if owner is None or isinstance(inspect.getattr_static(owner, name, None), property):
        return None
    value = getattr(owner, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
