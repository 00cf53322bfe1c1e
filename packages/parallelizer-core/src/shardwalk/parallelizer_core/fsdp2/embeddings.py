"""Embedding tables outside the blocks, and which of them may be units of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwalk.parallelizer_core.ties import SharedParameters


def untied_trainable_tables(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Each trainable table outside the units that shares no weight, and whether it is a head.

    Input tables are the `nn.Embedding` modules; heads are what `get_output_embeddings()` names and
    the `nn.Linear` modules outside the blocks with as many rows as an input table.
    """
    inputs = _input_tables(model)
    heads = _output_heads(model, inputs)
    shared = SharedParameters(model)
    for table in dict.fromkeys([*inputs, *heads]):
        if table is not model and _is_trainable(table) and not shared.leave(table):
            yield table, table in heads


def _input_tables(model: nn.Module) -> list[nn.Module]:
    tables = [module for module in _outside_units(model) if isinstance(module, nn.Embedding)]
    return _with_named_one(model, "get_input_embeddings", tables)


def _output_heads(model: nn.Module, inputs: list[nn.Module]) -> list[nn.Module]:
    rows = {table.num_embeddings for table in inputs if isinstance(table, nn.Embedding)}
    heads: list[nn.Module] = [
        module
        for module in _outside_units(model)
        if isinstance(module, nn.Linear) and module.out_features in rows
    ]
    return _with_named_one(model, "get_output_embeddings", heads)


def _with_named_one(model: nn.Module, getter: str, tables: Sequence[nn.Module]) -> list[nn.Module]:
    try:
        named = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return list(tables)
    is_new = (
        isinstance(named, nn.Module) and not isinstance(named, FSDPModule) and named not in tables
    )
    return [*tables, named] if is_new else list(tables)


def _outside_units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield child
            yield from _outside_units(child)


def _is_trainable(table: nn.Module) -> bool:
    own = list(table.parameters())
    return bool(own) and all(parameter.requires_grad for parameter in own)
