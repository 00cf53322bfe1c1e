"""Explicit prefetch chains: which blocks' weights are gathered while a block computes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwalk.parallelizer_core.parallel_state import fsdp_units


def chain_prefetch(blocks: Sequence[nn.Module], forward_depth: int, backward_depth: int) -> None:
    """Let every block gather the next blocks in forward and the previous ones in backward.

    A block stands for all units in it, the outermost first. Depth 0 leaves torch's own order in
    place.
    """
    units = [list(fsdp_units(block)) for block in blocks]
    for index, own in enumerate(units):
        if not own:
            continue
        ahead = [unit for later in units[index + 1 : index + 1 + forward_depth] for unit in later]
        behind = [
            unit
            for earlier in reversed(units[max(0, index - backward_depth) : index])
            for unit in reversed(earlier)
        ]
        if forward_depth:
            own[0].set_modules_to_forward_prefetch(ahead)
        if backward_depth:
            own[0].set_modules_to_backward_prefetch(behind)
