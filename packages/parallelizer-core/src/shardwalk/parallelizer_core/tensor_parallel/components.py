"""Linear layers that hold several components one after the other, such as query, key and value.

Their parameter is cut evenly, so that its placement tells checkpoints, optimizers and data
parallelism the truth. What a rank computes with is its part of every component, which the ranks
exchange whenever the layer runs, and whose gradient goes the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwalk.parallelizer_core._torch_compat import exchange_parts

Range = tuple[int, int]


def part_of_components(
    x: Tensor, mesh: DeviceMesh, components: Sequence[int], dim: int = 0
) -> Tensor:
    """This rank's part of every component, one after the other, of what is cut evenly along `dim`.

    Args:
        x: this rank's even part of the whole.
        components: the sizes of the components, each of which divides by the number of ranks.
    """
    leaving, received = _moves(tuple(components), mesh.size(), mesh.get_local_rank())
    rows = x.movedim(dim, 0)
    pieces = [rows[start:end] for ranges in leaving for start, end in ranges]
    sent = [sum(end - start for start, end in ranges) for ranges in leaving]
    moved = exchange_parts(torch.cat(pieces), list(received), sent, mesh.get_group())
    return moved.movedim(0, dim)


@lru_cache(maxsize=256)
def _moves(
    components: tuple[int, ...], ranks: int, own: int
) -> tuple[tuple[tuple[Range, ...], ...], tuple[int, ...]]:
    """The ranges of own rows that leave for each rank, and how many rows come from each."""
    held = sum(components) // ranks
    wanted = [_ranges(rank, components, ranks) for rank in range(ranks)]
    leaving = tuple(
        tuple((start - own * held, end - own * held) for start, end in _within(ranges, held, own))
        for ranges in wanted
    )
    received = tuple(
        sum(end - start for start, end in _within(wanted[own], held, rank)) for rank in range(ranks)
    )
    return leaving, received


def _ranges(rank: int, components: tuple[int, ...], ranks: int) -> list[Range]:
    """The rows of the whole that a rank computes with, in their order."""
    ranges: list[Range] = []
    start = 0
    for size in components:
        part = size // ranks
        ranges.append((start + rank * part, start + (rank + 1) * part))
        start += size
    return ranges


def _within(ranges: list[Range], held: int, rank: int) -> list[Range]:
    """Those rows of `ranges` that an even cut gives to `rank`."""
    cut = [(max(start, rank * held), min(end, (rank + 1) * held)) for start, end in ranges]
    return [(start, end) for start, end in cut if start < end]
