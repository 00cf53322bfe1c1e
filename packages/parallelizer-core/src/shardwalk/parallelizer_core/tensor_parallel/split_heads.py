"""The output heads of a model, whose logits every rank gathers, or leaves split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from torch import nn

from shardwalk.parallelizer_core.layers import find_block_stacks
from shardwalk.parallelizer_core.tensor_parallel.styles import ColumnParallel


@runtime_checkable
class SplitHeadForward(Protocol):
    """The forward of a column-cut layer.

    Attributes:
        keeps_split: whether what it would gather is left as a DTensor, split along its features.
    """

    style: ColumnParallel
    keeps_split: bool


def split_head_forwards(model: nn.Module) -> list[SplitHeadForward]:
    """The forwards of the column-cut output heads of `model` that hand on all their features."""
    found: list[SplitHeadForward] = []
    for module in _head_modules(model):
        forward = vars(module).get("forward")
        while forward is not None and not isinstance(forward, SplitHeadForward):
            forward = getattr(forward, "inner", None)
        if forward is not None and forward.style.gather_output:
            found.append(forward)
    return found


def _head_modules(model: nn.Module) -> Iterable[nn.Module]:
    """What the model calls its head, and what is in it; else all that stands outside the blocks."""
    try:
        named = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        named = None
    return named.modules() if isinstance(named, nn.Module) else _outside_blocks(model)


def _outside_blocks(model: nn.Module) -> Iterator[nn.Module]:
    blocks = {block for stack in find_block_stacks(model) for _, block in stack.blocks}
    inside = {module for block in blocks for module in block.modules()}
    return (module for module in model.modules() if module not in inside)
