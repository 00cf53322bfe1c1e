"""The input embedding and the output head of a model, where both can be cut along their rows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.direct_reads import modules_read_by_others
from shardwalk.parallelizer_core.fsdp2.embeddings import named_table
from shardwalk.parallelizer_core.tensor_parallel.embedding_styles import VocabularyParallel
from shardwalk.parallelizer_core.tensor_parallel.shared_inputs import hands_input_to_parent_class
from shardwalk.parallelizer_core.tensor_parallel.styles import ColumnParallel


def table_styles(
    model: nn.Module, outside: Mapping[str, nn.Module]
) -> dict[str, tuple[ParallelStyle, ...]]:
    """Row cuts for the input embedding, the output head and whatever is tied to them.

    They are what `get_input_embeddings()` and `get_output_embeddings()` name; in a model without
    these, the one `nn.Embedding` and the one `nn.Linear` in `outside` that have equally many rows.
    Empty unless both are found there, and where another module reads the weight of one: it would
    see the rows of its rank.
    """
    found = _named_pair(model) or _matching_pair(outside)
    if found is None:
        return {}
    pair = {id(module.weight) for module in found}
    owners = {
        path: module
        for path, module in model.named_modules()
        if any(id(p) in pair for p in module.parameters(recurse=False))
    }
    if not all(path in outside and is_cuttable(module) for path, module in owners.items()):
        return {}
    if modules_read_by_others(model).keys() & set(owners.values()):
        return {}
    return {path: (_style(module),) for path, module in owners.items()}


def _style(module: nn.Module) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        return VocabularyParallel()
    return ColumnParallel(gather_output=True)


def _named_pair(model: nn.Module) -> tuple[nn.Embedding, nn.Linear] | None:
    table = named_table(model, "get_input_embeddings")
    head = named_table(model, "get_output_embeddings")
    return (table, head) if _is_pair(table, head) else None  # type: ignore[return-value]


def _matching_pair(outside: Mapping[str, nn.Module]) -> tuple[nn.Embedding, nn.Linear] | None:
    pairs = [
        (table, head)
        for table in outside.values()
        if isinstance(table, nn.Embedding)
        for head in outside.values()
        if isinstance(head, nn.Linear) and _is_pair(table, head)
    ]
    weights = {(table.weight, head.weight) for table, head in pairs}
    return pairs[0] if len(weights) == 1 else None


def _is_pair(table: object, head: object) -> bool:
    is_pair = isinstance(table, nn.Embedding) and isinstance(head, nn.Linear)
    return is_pair and table.num_embeddings == head.out_features  # type: ignore[attr-defined]


def is_cuttable(module: nn.Module) -> bool:
    """Whether a table or head does no more than look up or project, so that a part of it can."""
    if isinstance(module, nn.Embedding):
        plain = type(module).forward is nn.Embedding.forward or hands_input_to_parent_class(module)
        return plain and not (module.scale_grad_by_freq or module.max_norm or module.sparse)
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
