"""The default plan: what a model's structure alone allows to split, without its name.

Every block must consist of attention, feed-forward layers and norms. Anything else with parameters
makes the plan an error that names it, since what it sees under the split cannot be known.
"""

from __future__ import annotations

from collections import defaultdict

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.layers import (
    BlockStack,
    find_block_stacks,
    frozen_towers,
    tower_paths,
)
from shardwalk.parallelizer_core.tensor_parallel.block_styles import Styles, block_styles
from shardwalk.parallelizer_core.tensor_parallel.replicas import WholeInput
from shardwalk.parallelizer_core.tensor_parallel.roles import MisfitError
from shardwalk.parallelizer_core.tensor_parallel.styles import SequenceBoundary
from shardwalk.parallelizer_core.tensor_parallel.tables import table_styles


def structural_plan(
    model: nn.Module, tp_size: int, sequence_parallel: bool
) -> dict[str, tuple[ParallelStyle, ...]]:
    """A plan for a model whose blocks are attention, feed-forward layers and norms.

    Queries, keys and values are cut by heads, a feed-forward layer by its inner features, an
    embedding and a head that match by their rows. All else outside the blocks stays whole, and so
    do frozen vision and audio towers. Trainable ones beside a language model are split likewise,
    but not over the sequence.

    Raises:
        ValueError: a module in a block is none of these, named with the reason and the way out.
    """
    try:
        return _plan(model, sequence_parallel)
    except MisfitError as misfit:
        raise ValueError(
            f"tp_size={tp_size}: {misfit.path or type(model).__name__} does not fit the default "
            f"tensor-parallel plan: {misfit.why}; pass tp_plan=... (a dict of module paths to "
            f"styles, or the name of one), or use tp_size=1"
        ) from None


def _plan(model: nn.Module, sequence_parallel: bool) -> dict[str, tuple[ParallelStyle, ...]]:
    towers = [name for name, _ in frozen_towers(model)]
    stacks = [stack for stack in find_block_stacks(model) if not _is_in(stack.name, towers)]
    if not stacks:
        raise MisfitError("", "it holds no stack of blocks to split")
    first_paths = {module: path for path, module in model.named_modules()}
    styles: dict[str, list[ParallelStyle]] = defaultdict(list)
    # The layers of a tower may be read one by one, and outside of its stack they must be whole.
    is_in_tower = tower_paths(model)
    are_all_towers = all(is_in_tower(stack.name) for stack in stacks)
    for stack in stacks:
        splits = sequence_parallel and (are_all_towers or not is_in_tower(stack.name))
        for path, style in _stack_styles(stack, splits):
            # A module that stands in several blocks is planned where it stands first.
            if first_paths[model.get_submodule(path)] == path:
                styles[path].append(style)
    blocks = [path for stack in stacks for path, _ in stack.blocks]
    outside = _outside(model, [*blocks, *towers])
    plan: dict[str, tuple[ParallelStyle, ...]] = dict.fromkeys([*outside, *towers], (WholeInput(),))
    plan |= {path: tuple(found) for path, found in styles.items()} | table_styles(model, outside)
    return {path: plan[path] for path in first_paths.values() if path in plan}


def _stack_styles(stack: BlockStack, sequence_parallel: bool) -> Styles:
    for path, block in stack.blocks:
        yield from block_styles(path, block, sequence_parallel)
    if not sequence_parallel:
        return
    # After the block's own styles, so that it goes around them.
    first, last = stack.blocks[0][0], stack.blocks[-1][0]
    if first == last:
        yield first, SequenceBoundary(enter=True, leave=True)
    else:
        yield first, SequenceBoundary(enter=True)
        yield last, SequenceBoundary(leave=True)


def _outside(model: nn.Module, inside: list[str]) -> dict[str, nn.Module]:
    """The modules with parameters of their own that neither stand in these places nor hold them."""
    return {
        path: module
        for path, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and not _is_in(path, inside)
        and not any(_is_in(place, [path]) for place in inside)
    }


def _is_in(path: str, places: list[str]) -> bool:
    return any(not place or path == place or path.startswith(f"{place}.") for place in places)
