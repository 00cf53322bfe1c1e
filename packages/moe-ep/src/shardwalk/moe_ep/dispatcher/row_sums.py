"""The arithmetic on rows that dispatchers share: sums by bag, and their gradients.

A bag is a set of rows that are summed, such as the slots of one token. On one CPU thread
`torch.embedding_bag` takes a third of the time of `index_add_` and needs no weighted copy of the
rows; on a GPU it is deterministic, which `index_add_` is not. Sums are made in fp32 (fp64 for fp64
rows). Where narrower rows meet fp32 weights, a few columns at a time are widened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwalk.moe_ep._torch_compat import products_by_bag

_COLUMNS = {"cpu": 128}
_COLUMNS_ELSEWHERE = 1024  # fewer kernels


@dataclass(frozen=True, kw_only=True)
class Bags:
    """Which rows belong to which bag.

    Attributes:
        members: int64 [M], the numbers of the rows, bag by bag.
        starts: int64 [B], where the members of each bag begin; the last ends with the members.
    """

    members: Tensor
    starts: Tensor


def sum_rows(rows: Tensor, bags: Bags) -> Tensor:
    """The sum of the rows of each bag: [B, H], zeros for an empty one."""
    if rows.shape[0] == 0:
        return rows.new_zeros(bags.starts.shape[0], rows.shape[1])
    return _embedding_bag(rows.contiguous(), bags.members, bags.starts)


def weighted_sum_rows(rows: Tensor, weights: Tensor, bags: Bags, dtype: torch.dtype) -> Tensor:
    """The sum of weight times row of each bag: [B, H] in `dtype`.

    Args:
        rows: [N, H].
        weights: [N], one for each row.
        bags: B bags.
        dtype: of the result.
    """
    if rows.shape[0] == 0:
        return rows.new_zeros(bags.starts.shape[0], rows.shape[1], dtype=dtype)
    wide = wide_dtype(rows)
    weights = weights.to(wide).index_select(0, bags.members)
    if rows.dtype == dtype == wide:
        return _embedding_bag(rows.contiguous(), bags.members, bags.starts, weights)
    result = rows.new_empty(bags.starts.shape[0], rows.shape[1], dtype=dtype)
    for columns in _blocks(rows):
        block = _wide_block(rows, columns, wide)
        result[:, columns] = _embedding_bag(block, bags.members, bags.starts, weights)
    return result


def weighted_copies(rows: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """``weights[n] * rows[index[n]]`` for every n: [N, H] in `dtype`, without a second pass."""
    if index.shape[0] == 0:
        return rows.new_empty(0, rows.shape[1], dtype=dtype)
    wide = wide_dtype(rows)
    weights, starts = weights.to(wide), torch.arange(index.shape[0], device=index.device)
    if rows.dtype == dtype == wide:
        return _embedding_bag(rows.contiguous(), index, starts, weights)
    result = rows.new_empty(index.shape[0], rows.shape[1], dtype=dtype)
    for columns in _blocks(rows):
        block = _wide_block(rows, columns, wide)
        result[:, columns] = _embedding_bag(block, index, starts, weights)
    return result


def row_products(sums: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """The scalar product of ``rows[n]`` with ``sums[index[n]]`` for every n: [N], fp32 or fp64."""
    wide = torch.promote_types(wide_dtype(rows), wide_dtype(sums))
    if rows.shape[0] == 0:
        return rows.new_empty(0, dtype=wide)
    if rows.dtype == sums.dtype == wide:
        return products_by_bag(sums.contiguous(), rows.contiguous(), index)
    result = rows.new_zeros(rows.shape[0], dtype=wide)
    for columns in _blocks(rows):
        blocks = _wide_block(sums, columns, wide), _wide_block(rows, columns, wide)
        result += products_by_bag(*blocks, index)
    return result


def wide_dtype(rows: Tensor) -> torch.dtype:
    """The dtype to add rows in: fp32, or fp64 where they are fp64."""
    return torch.promote_types(rows.dtype, torch.float32)


def _embedding_bag(
    rows: Tensor, members: Tensor, starts: Tensor, weights: Tensor | None = None
) -> Tensor:
    # For operands that require grad torch also lays out a backward, which is not wanted here.
    weights = None if weights is None else weights.detach()
    sums, *_ = torch.embedding_bag(
        rows.detach(), members, starts, mode=0, per_sample_weights=weights
    )
    return sums


def _blocks(rows: Tensor) -> Iterator[slice]:
    width = _COLUMNS.get(rows.device.type, _COLUMNS_ELSEWHERE)
    for start in range(0, rows.shape[1], width):
        yield slice(start, start + width)


def _wide_block(rows: Tensor, columns: slice, wide: torch.dtype) -> Tensor:
    return rows[:, columns].to(wide).contiguous()
