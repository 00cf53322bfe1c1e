"""Blocks that stand several times in a stack, where its ends split and gather the sequence."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.layers import BlockStack, find_block_stacks
from shardwalk.parallelizer_core.tensor_parallel.styles import SequenceBoundary


def refuse_unpaired_boundaries(
    model: nn.Module, plan: Mapping[str, tuple[ParallelStyle, ...]]
) -> None:
    """Refuse a stack in whose order a block would split what is split, or gather what is whole.

    A block does at each of its calls what it does at one, so that [a, b, a, b] can be right, where
    a splits and b gathers, and [a, b, a] cannot.

    Raises:
        ValueError: names both places of the block that stands twice.
    """
    first = {module: path for path, module in model.named_modules()}
    for stack in find_block_stacks(model):
        order = _order(model, stack)
        boundaries = {block: _boundaries(plan.get(path, ())) for path, block in stack.blocks}
        repeated = [
            (path, first[block])
            for path, block in order
            if boundaries[block] and first[block] != path
        ]
        if repeated and not _is_paired([boundaries[block] for _, block in order]):
            again, before = repeated[0]
            raise ValueError(
                f"sequence_parallel=True: {again} is {before} again, and the first and last block "
                f"of {stack.name or 'the stack'} split and gather the sequence wherever they "
                f"stand; let a block that stands twice be neither, or use sequence_parallel=False"
            )


def _order(model: nn.Module, stack: BlockStack) -> list[tuple[str, nn.Module]]:
    """The blocks of a stack in their order, one that stands twice at each of its places."""
    blocks = {block for _, block in stack.blocks}
    return [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if module in blocks and path.rpartition(".")[0] == stack.name
    ]


def _boundaries(styles: tuple[ParallelStyle, ...]) -> list[SequenceBoundary]:
    return [style for style in styles if isinstance(style, SequenceBoundary)]


def _is_paired(blocks: list[list[SequenceBoundary]]) -> bool:
    """Whether calls in this order split what is whole and gather what is split, to the end."""
    is_split = False
    for found in blocks:
        enters, leaves = any(style.enter for style in found), any(style.leave for style in found)
        if is_split == enters:
            return False
        is_split = not leaves
    return not is_split
