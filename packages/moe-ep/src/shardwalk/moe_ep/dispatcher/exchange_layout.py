"""The layout of an all-to-all dispatch: which tokens go where, and what arrives for which expert.

Slots are sorted by rank (this rank's own last) and token, so that a rank's slots of one token are
neighbours and share one row. What crosses beside the rows is 8 bytes for each slot: an int32 that
holds its expert and whether it begins a new row, and its fp32 weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwalk.moe_ep.dispatcher.exchange_sizes import ExchangeSizes, Splits
from shardwalk.moe_ep.dispatcher.row_sums import Bags
from shardwalk.moe_ep.dispatcher.slots import SlotLayout, inverse, starts_of


@dataclass(frozen=True, kw_only=True)
class ExchangeLayout:
    """All that a dispatch and its combine need to know about where rows go.

    Attributes:
        shape: tokens of this rank, and slots of each.
        row_splits: how many rows go to and come from each rank.
        slot_splits: the same for slots.
        sent_tokens: int64, the token of each row that is sent.
        sent_slots: int64, the number in [T x k] of each slot that is sent.
        tokens: the sent rows of each token.
        arrived: the slots of the experts of this rank, and the arrived rows that they copy.
        weights: fp32, the weights of those slots, without a graph.
        counts: slots of each expert of this rank.
    """

    shape: tuple[int, int]
    row_splits: Splits
    slot_splits: Splits
    sent_tokens: Tensor
    sent_slots: Tensor
    tokens: Bags
    arrived: SlotLayout
    weights: Tensor
    counts: list[int]


def process_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """The process group that is meant; raise ValueError for a mesh of several axes."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a dispatcher takes a mesh of one axis, not of {group.mesh_dim_names}; slice the "
                f'expert-parallel axis: mesh["ep"]'
            )
        return group.get_group()
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not one of the expert-parallel group; give it its own group")
    return group


class Peers:
    """The ranks of one group that exchange tokens.

    Attributes:
        group: their process group.
        rank: this rank in the group.
        size: number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def exchange(self, received: Tensor, sent: Tensor, splits: Splits) -> None:
        """Send `sent` and fill `received`, both without this rank's own pieces."""
        dist.all_to_all_single(received, sent, splits.received, splits.sent, group=self.group)

    def exchange_with_own(self, pieces: Tensor, splits: Splits) -> Tensor:
        """What all ranks have for this one; own pieces stand last, in and out."""
        arrived = pieces.new_empty(splits.arriving + splits.own, *pieces.shape[1:])
        pieces = pieces.contiguous()
        self.exchange(arrived[: splits.arriving], pieces[: splits.leaving], splits)
        arrived[splits.arriving :] = pieces[splits.leaving :]
        return arrived


def exchange_layout(
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    peers: Peers,
    sizes: ExchangeSizes | None = None,
) -> ExchangeLayout:
    """Lay out a dispatch: an exchange of counts, one copy to the host, an exchange of slots.

    Args:
        experts: int64 [T, k].
        weights: fp32 [T, k].
        num_experts: of all ranks.
        peers: who exchanges.
        sizes: instead of those that were counted; then nothing is copied to the host.

    Raises:
        ValueError: on every rank, where one has an expert that there is not.
    """
    sorted_slots = _SortedSlots(experts, num_experts, peers)
    table = sorted_slots.table()
    received = torch.empty_like(table)
    dist.all_to_all_single(received, table, group=peers.group)
    if sizes is None:
        sizes = _on_the_host(table, received, num_experts)
    rows, slots = sizes.rows(peers.rank), sizes.slots(peers.rank)
    sent = sorted_slots.order[: slots.leaving + slots.own]
    begins = sorted_slots.begins[: sent.shape[0]]
    packed = _pack(sorted_slots.local_experts(sent), begins, weights.detach().flatten()[sent])
    arrived, arrived_weights = _sort_arrived(
        peers.exchange_with_own(packed, slots), rows.arriving + rows.own
    )
    first = torch.nonzero_static(begins, size=rows.leaving + rows.own).flatten()
    sent_tokens = sent.index_select(0, first) // experts.shape[1]
    return ExchangeLayout(
        shape=(experts.shape[0], experts.shape[1]),
        row_splits=rows,
        slot_splits=slots,
        sent_tokens=sent_tokens,
        sent_slots=sent,
        tokens=_bags_by_token(sent_tokens, experts.shape[0]),
        arrived=arrived,
        weights=arrived_weights,
        counts=list(sizes.counts),
    )


class _SortedSlots:
    """The slots of this rank's tokens by rank, this one last, and token; dropped ones at the end.

    Attributes:
        order: int64 [T x k], the number of each slot before the sort.
        begins: bool [T x k], whether a slot is the first of its token for its rank.
    """

    def __init__(self, experts: Tensor, num_experts: int, peers: Peers) -> None:
        self._num_experts, self._peers = num_experts, peers
        self._per_rank = num_experts // peers.size
        flat = experts.long().flatten()
        self._invalid = flat >= num_experts
        self._experts = flat.where((flat >= 0) & ~self._invalid, num_experts)
        ranks = self._experts // self._per_rank  # of a dropped slot: the number of ranks
        own_last = ranks.where(ranks != peers.rank, peers.size)
        own_last = own_last.where(ranks != peers.size, peers.size + 1)
        self.order = own_last.argsort(stable=True)
        self._ranks = ranks.index_select(0, self.order)
        tokens = self.order // max(experts.shape[1], 1)
        self.begins = torch.ones_like(self.order, dtype=torch.bool)
        self.begins[1:] = (self._ranks.diff() != 0) | (tokens.diff() != 0)

    def table(self) -> Tensor:
        """What to tell each rank, int64 [ranks, experts of a rank + 2].

        Slots of each of its experts, rows, and how many slots of this rank name no expert.
        """
        slots = _count(self._experts, torch.ones_like(self._experts), self._num_experts)
        rows = _count(self._ranks, self.begins.long(), self._peers.size)
        invalid = self._invalid.sum().expand(self._peers.size)
        return torch.column_stack((slots.view(self._peers.size, -1), rows, invalid))

    def local_experts(self, slots: Tensor) -> Tensor:
        """The experts of slots, by their number on the rank that has them."""
        return self._experts.index_select(0, slots) % self._per_rank


def _count(index: Tensor, amounts: Tensor, size: int) -> Tensor:
    """Add up amounts by index; index `size` is for those that don't count."""
    return index.new_zeros(size + 1).scatter_add_(0, index, amounts)[:size]


def _on_the_host(table: Tensor, received: Tensor, num_experts: int) -> ExchangeSizes:
    sent, arrived = torch.stack((table, received)).tolist()
    if any(line[-1] for line in arrived):
        raise ValueError(
            f"experts hold numbers of {num_experts} and more, which num_experts={num_experts} does "
            f"not have (slots by rank: {[line[-1] for line in arrived]}); -1 drops a slot"
        )
    return ExchangeSizes(
        sent_rows=[line[-2] for line in sent],
        received_rows=[line[-2] for line in arrived],
        sent_slots=[sum(line[:-2]) for line in sent],
        received_slots=[sum(line[:-2]) for line in arrived],
        counts=[sum(counts) for counts in zip(*(line[:-2] for line in arrived), strict=True)],
    )


def _pack(local_experts: Tensor, begins: Tensor, weights: Tensor) -> Tensor:
    """Slots as they cross, int32 [S, 2]: 2 x expert + whether a row begins, and the weight."""
    codes = (2 * local_experts + begins).int()
    return torch.stack((codes, weights.float().view(torch.int32)), dim=1)


def _sort_arrived(packed: Tensor, rows: int) -> tuple[SlotLayout, Tensor]:
    """The arrived slots by expert, and their weights in that order."""
    codes, weights = packed[:, 0], packed[:, 1].contiguous().view(torch.float32)
    begins = codes & 1
    order = (codes >> 1).argsort(stable=True)
    layout = SlotLayout(
        order=order,
        rows=(begins.cumsum(0) - 1).index_select(0, order),
        bags=Bags(
            members=inverse(order),
            starts=torch.nonzero_static(begins, size=rows).flatten(),
        ),
    )
    return layout, weights.index_select(0, order)


def _bags_by_token(sent_tokens: Tensor, tokens: int) -> Bags:
    sizes = _count(sent_tokens, torch.ones_like(sent_tokens), tokens)
    return Bags(members=sent_tokens.argsort(stable=True), starts=starts_of(sizes))
