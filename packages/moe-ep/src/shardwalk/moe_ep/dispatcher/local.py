"""The dispatcher of one rank that holds all experts: it sorts, and sends nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwalk.moe_ep.dispatch_replay import forward_layout
from shardwalk.moe_ep.dispatcher.protocol import (
    DispatchMetadata,
    check_num_experts,
    check_outputs,
    check_tokens,
)
from shardwalk.moe_ep.dispatcher.row_sums import Bags, wide_dtype
from shardwalk.moe_ep.dispatcher.slots import (
    SlotLayout,
    expand_rows,
    inverse,
    starts_of,
    sum_slots,
)


@dataclass(frozen=True, kw_only=True)
class LocalLayout:
    """The slots of this rank's tokens; their numbers before the sort are those in [T x k].

    Attributes:
        shape: tokens, and slots of each.
        slots: those that were not dropped.
        counts: slots of each expert.
    """

    shape: tuple[int, int]
    slots: SlotLayout
    counts: list[int]


@dataclass(frozen=True, kw_only=True)
class LocalMetadata(DispatchMetadata):
    """What `LocalDispatcher.combine` needs.

    Attributes:
        slots: the layout of the slots.
        weights: fp32 [N], of the sorted slots, with their graph.
        dtype: of the tokens.
    """

    slots: SlotLayout
    weights: Tensor
    dtype: torch.dtype


class LocalDispatcher:
    """Sorts tokens by expert and sums their results, on one rank; see `TokenDispatcher`.

    Args:
        num_experts: of the layer, all of them on this rank.

    Raises:
        ValueError: `num_experts` is below 1.
    """

    def __init__(self, num_experts: int) -> None:
        check_num_experts(num_experts, ranks=1)
        self.num_experts = num_experts

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, LocalMetadata]:
        """Copy every token to its experts; see `TokenDispatcher.dispatch`.

        Raises:
            ValueError: for an expert that there is not.
        """
        check_tokens(x, experts, weights)
        layout = forward_layout(experts, lambda: local_layout(experts, self.num_experts))
        metadata = LocalMetadata(
            counts=layout.counts,
            slots=layout.slots,
            weights=weights.to(wide_dtype(weights)).flatten().index_select(0, layout.slots.order),
            dtype=x.dtype,
        )
        return expand_rows(x, layout.slots), metadata

    def combine(self, outputs: Tensor, metadata: LocalMetadata) -> Tensor:
        """Sum the weighted results of every token; see `TokenDispatcher.combine`."""
        check_outputs(outputs, metadata.counts)
        return sum_slots(outputs, metadata.weights, metadata.slots, metadata.dtype)


def local_layout(experts: Tensor, num_experts: int) -> LocalLayout:
    """Sort the slots by expert; one copy to the host.

    Raises:
        ValueError: for an expert that there is not.
    """
    slots = experts.long().flatten()
    kept = slots >= 0
    by_expert = slots.where(slots < num_experts, num_experts + 1).where(kept, num_experts)
    counts = torch.zeros(num_experts + 2, dtype=torch.int64, device=slots.device)
    counts.scatter_add_(0, by_expert, torch.ones_like(slots))
    *counts_of_experts, dropped, invalid = counts.tolist()
    if invalid:
        raise ValueError(
            f"experts hold numbers of {num_experts} and more, which num_experts={num_experts} does "
            f"not have (in {invalid} slots); -1 drops a slot"
        )
    order, total = by_expert.argsort(stable=True), slots.shape[0] - dropped
    members = inverse(order)
    if dropped:
        members = members[torch.nonzero_static(kept, size=total).flatten()]
    sizes = kept.view(experts.shape).sum(1)
    return LocalLayout(
        shape=(experts.shape[0], experts.shape[1]),
        slots=SlotLayout(
            order=order[:total],
            rows=order[:total] // max(experts.shape[1], 1),
            bags=Bags(members=members, starts=starts_of(sizes)),
        ),
        counts=counts_of_experts,
    )
