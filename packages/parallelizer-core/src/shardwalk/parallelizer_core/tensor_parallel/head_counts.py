"""How many heads an attention has, by its projections and by the counts that it names."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from shardwalk.parallelizer_core.tensor_parallel.reshaped_widths import (
    reshape_to_input,
    reshaped_widths,
)
from shardwalk.parallelizer_core.tensor_parallel.role_names import (
    HEAD_WIDTH_ATTRIBUTES,
    KEY_VALUE_COUNTS,
    QUERY_COUNTS,
)
from shardwalk.parallelizer_core.tensor_parallel.roles import Attention, MisfitError


@dataclass(frozen=True, kw_only=True)
class HeadCounts:
    """How many heads of which width the projections of an attention hold."""

    heads: int
    key_value_heads: int
    head_dim: int


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
    if query % width or key % width or (attention.fused and not _holds_heads(attention, width)):
        raise MisfitError(
            attention.path, f"heads of {width} do not divide its projections of {query} and {key}"
        )
    counts = HeadCounts(heads=query // width, key_value_heads=key // width, head_dim=width)
    _check_config(attention, counts)
    return counts


def count_attributes(attention: Attention, counts: HeadCounts) -> tuple[str, ...]:
    """The names of the attributes that hold its number of heads, or sizes that go with it.

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
    call = reshape_to_input(attention.module)
    if call is not None:
        raise MisfitError(
            attention.path,
            f"its forward calls {call}, the width of its input, with the heads of one rank",
        )
    fused = attention.fused.counts if attention.fused else ()
    widths = reshaped_widths(attention.module, counts.heads * counts.head_dim)
    return tuple(dict.fromkeys([*found, *fused, *widths]))


def _holds_heads(attention: Attention, width: int) -> bool:
    """Whether each unit of fused projections is one key-value head with its queries."""
    layout = attention.fused
    assert layout is not None
    return not layout.unit or layout.unit * (attention.width(1) // width) == sum(
        attention.fused_widths
    )


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
