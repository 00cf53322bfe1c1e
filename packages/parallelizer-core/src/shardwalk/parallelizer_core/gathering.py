"""Bringing sharded tensors to one rank, one after another.

Only that rank ever holds a whole tensor: the others send it the blocks they hold, each block from
one of the ranks that hold it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core.model_tensors import ModelTensor, local_index, local_part
from shardwalk.parallelizer_core.parallel_state import current_device

Spans = tuple[tuple[int, int], ...]


class HeldTensor(NamedTuple):
    """What a rank says of a tensor that it holds.

    Attributes:
        name: the canonical name, the same on every rank that holds a part.
        shape: of the full tensor.
        dtype: of the tensor.
        pinned: whether it stays in fp32 whatever dtype is asked for.
        spans: start and stop of the block held, per dimension; None when what is held is no block
            of the values (terms of a sum, rows that lie apart).
        device_type: where the block lies.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pinned: bool
    spans: Spans | None
    device_type: str


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """One tensor to gather.

    Attributes:
        held: what its first holder says of it.
        blocks: the rank in the group that sends a block, by the block.
        whole: whether its holders gather it among themselves first, since none holds a block.
    """

    held: HeldTensor
    blocks: dict[Spans, int] = field(default_factory=dict)
    whole: bool = False

    @property
    def nbytes(self) -> int:
        """The size of the full tensor."""
        return math.prod(self.held.shape) * self.held.dtype.itemsize


def held_tensor(entry: ModelTensor, *, pinned: bool) -> HeldTensor:
    """What this rank says of a tensor of the model; no communication."""
    tensor = entry.tensor
    return HeldTensor(
        name=entry.name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        pinned=pinned,
        spans=_spans(tensor),
        device_type=local_part(tensor).device.type,
    )


def plan_gathering(tables: Sequence[Sequence[HeldTensor]]) -> list[Gathered]:
    """Who sends what, from what every rank of the group says; the receiver is the first rank.

    Raises:
        ValueError: when ranks hold tensors of one name that do not make up one tensor, or one rank
            holds two tensors of one name; the same on every rank.
    """
    plan: dict[str, Gathered] = {}
    for rank, table in enumerate(tables):
        twice = [name for name, count in Counter(held.name for held in table).items() if count > 1]
        if twice:
            raise ValueError(f"two different tensors have one name: {', '.join(twice)}")
        for held in table:
            _add_holder(plan, held, rank)
    for item in plan.values():
        _check_blocks(item)
    return list(plan.values())


def gather_to_first(
    item: Gathered, tensor: Tensor | None, group: dist.ProcessGroup | None
) -> Iterator[tuple[Spans, Tensor]]:
    """Yield the blocks of a tensor on the first rank of the group; nothing on the others.

    Every rank takes this to its end for every tensor of the plan, in one order. Blocks may share
    the model's memory or that of the next block.

    Args:
        item: the tensor's part of the plan.
        tensor: the tensor itself on the ranks that hold it, else None.
        group: the ranks that planned this; None means all.
    """
    rank = _rank(group)
    own = None if tensor is None else _own_block(item, tensor)
    for spans, sender in item.blocks.items():
        if sender == rank == 0:
            assert own is not None
            yield spans, own
        elif sender == rank:
            assert own is not None
            _exchange(dist.isend, own.contiguous(), 0, group)
        elif rank == 0:
            sizes = [stop - start for start, stop in spans]
            device = current_device(item.held.device_type)
            block = torch.empty(sizes, dtype=item.held.dtype, device=device)
            _exchange(dist.irecv, block, sender, group)
            yield spans, block


def whole_tensor(item: Gathered, blocks: Iterator[tuple[Spans, Tensor]]) -> Tensor:
    """The full tensor on the CPU, made of all its blocks; it may be the model's own."""
    held, everything = item.held, _whole(item.held.shape)
    full: Tensor | None = None
    for spans, block in blocks:
        if spans == everything:
            full = block.to("cpu")
            continue
        if full is None:
            full = torch.empty(held.shape, dtype=held.dtype)
        full[tuple(slice(*span) for span in spans)].copy_(block)
    return torch.empty(held.shape, dtype=held.dtype) if full is None else full


def _spans(tensor: Tensor) -> Spans | None:
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        return None
    try:
        return tuple((part.start, part.stop) for part in local_index(tensor))
    except NotImplementedError:
        return None


def _whole(shape: Sequence[int]) -> Spans:
    return tuple((0, size) for size in shape)


def _add_holder(plan: dict[str, Gathered], held: HeldTensor, rank: int) -> None:
    item = plan.get(held.name)
    if item is None:
        whole = held.spans is None
        item = plan[held.name] = Gathered(held=held, whole=whole)
    first = item.held
    same = (first.shape, first.dtype, item.whole) == (held.shape, held.dtype, held.spans is None)
    if not same:
        raise ValueError(
            f"{held.name} is no one tensor over the ranks: {list(first.shape)} {first.dtype} on "
            f"one, {list(held.shape)} {held.dtype} on rank {rank} of the group"
        )
    spans = _whole(held.shape) if held.spans is None else held.spans
    if all(start < stop for start, stop in spans):
        item.blocks.setdefault(spans, rank)


def _check_blocks(item: Gathered) -> None:
    held = sum(math.prod(stop - start for start, stop in spans) for spans in item.blocks)
    if held != math.prod(item.held.shape):
        raise ValueError(
            f"the ranks hold {held} of the {math.prod(item.held.shape)} elements of "
            f"{item.held.name} {list(item.held.shape)}; pass as process_group= the ranks that hold "
            f"the model, all of them and no others"
        )


def _own_block(item: Gathered, tensor: Tensor) -> Tensor:
    if item.whole:
        assert isinstance(tensor, DTensor)
        return tensor.full_tensor().detach()  # a collective of its holders
    return local_part(tensor)


def _exchange(operation: Any, block: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
    """Send or receive the bytes of a contiguous block, which any backend can."""
    raw = block.view(-1).view(torch.uint8)
    # Not send and recv: NCCL would make a communicator for every pair of ranks.
    for work in dist.batch_isend_irecv([dist.P2POp(operation, raw, group=group, group_peer=peer)]):
        work.wait()


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0
