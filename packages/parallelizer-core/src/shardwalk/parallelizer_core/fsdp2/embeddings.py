"""Embedding tables outside the blocks, and which of them may be units of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwalk.parallelizer_core.direct_reads import modules_read_by_others
from shardwalk.parallelizer_core.layers import has_forward
from shardwalk.parallelizer_core.ties import SharedParameters


def untied_trainable_tables(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Each trainable table outside the units that stands for itself, and whether it is a head.

    One that shares its weight, or whose weight another module reads, stays in the root unit.

    They are what `get_input_embeddings()` and `get_output_embeddings()` name; in a model without
    these, every `nn.Embedding`, and every `nn.Linear` with as many rows as one of them.
    """
    inputs = _input_tables(model)
    heads = _output_heads(model, inputs)
    shared, read = SharedParameters(model), modules_read_by_others(model)
    for table in dict.fromkeys([*inputs, *heads]):
        is_free = table is not model and table not in read and not shared.leave(table)
        if is_free and _is_trainable(table):
            yield table, table in heads


def _input_tables(model: nn.Module) -> list[nn.Module]:
    named = named_table(model, "get_input_embeddings")
    if named is not None:
        return _callable_parts(named)
    return [module for module in _outside_units(model) if isinstance(module, nn.Embedding)]


def _output_heads(model: nn.Module, inputs: Sequence[nn.Module]) -> list[nn.Module]:
    named = named_table(model, "get_output_embeddings")
    if named is not None:
        return _callable_parts(named)
    rows = {table.num_embeddings for table in inputs if isinstance(table, nn.Embedding)}
    return [
        module
        for module in _outside_units(model)
        if isinstance(module, nn.Linear) and module.out_features in rows
    ]


def _callable_parts(table: nn.Module) -> list[nn.Module]:
    """The table, or the tables of a list of them that no unit holds yet."""
    if has_forward(table):
        return [table]
    return [module for module in _outside_units(table) if has_forward(module)]


def named_table(model: nn.Module, getter: str) -> nn.Module | None:
    """What the model itself calls its table: the others it may read without calling them."""
    try:
        named = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    is_table = isinstance(named, nn.Module) and not isinstance(named, FSDPModule)
    return named if is_table else None


def _outside_units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield child
            yield from _outside_units(child)


def _is_trainable(table: nn.Module) -> bool:
    own = list(table.parameters())
    return bool(own) and all(parameter.requires_grad for parameter in own)
