"""The dispatcher that exchanges tokens by all-to-all, on any backend that has it.

A token crosses once to every rank that has experts of it, however many; there its results are
weighted and summed, so that one row comes back. Where all experts are on one rank, nothing crosses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwalk.moe_ep._torch_compat import is_fake
from shardwalk.moe_ep.dispatch_replay import forward_layout
from shardwalk.moe_ep.dispatcher.exchange_layout import (
    ExchangeLayout,
    Peers,
    exchange_layout,
    process_group,
)
from shardwalk.moe_ep.dispatcher.exchange_sizes import ExchangeSizes
from shardwalk.moe_ep.dispatcher.local import LocalDispatcher, LocalMetadata
from shardwalk.moe_ep.dispatcher.protocol import (
    DispatchMetadata,
    check_num_experts,
    check_outputs,
    check_tokens,
)
from shardwalk.moe_ep.dispatcher.row_exchange import send_rows, sum_at_home
from shardwalk.moe_ep.dispatcher.slots import expand_rows, sum_slots


@dataclass(frozen=True, kw_only=True)
class AllToAllMetadata(DispatchMetadata):
    """What `AllToAllDispatcher.combine` needs.

    Attributes:
        layout: of the exchange.
        weights: fp32 [N], of the sorted slots, with their graph.
        dtype: of the tokens.
    """

    layout: ExchangeLayout
    weights: Tensor
    dtype: torch.dtype


class AllToAllDispatcher:
    """Brings tokens to their experts by all-to-all; see `TokenDispatcher`.

    A forward takes one exchange of counts, one of expert numbers and weights (8 bytes a slot), two
    of rows and one copy to the host; a backward two of rows and one for the weights' gradients,
    if they need them; a recompute one or two of rows.

    Args:
        num_experts: of the layer, on all ranks; each rank has an equal block of them, in order.
        group: the expert-parallel ranks, as a process group or a mesh of one axis.
        splits: for planning with fake tensors, whose counts nobody can read: the sizes to assume,
            or "even" for tokens that spread evenly over ranks and experts.

    Raises:
        ValueError: the experts don't divide evenly over the ranks; a mesh of several axes.

    Example:
        ::

            dispatcher = AllToAllDispatcher(64, mesh_context.moe_mesh["ep"])
            rows, metadata = dispatcher.dispatch(x, routing.experts, routing.weights)
            y = dispatcher.combine(experts(rows, metadata.counts), metadata)
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup | DeviceMesh,
        *,
        splits: ExchangeSizes | Literal["even"] | None = None,
    ) -> None:
        self._peers = Peers(process_group(group))
        check_num_experts(num_experts, self._peers.size)
        self.num_experts = num_experts
        self._splits = splits
        self._local = LocalDispatcher(num_experts) if self._peers.size == 1 else None

    def dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, AllToAllMetadata | LocalMetadata]:
        """Bring every token to its experts; see `TokenDispatcher.dispatch`.

        Raises:
            TypeError: `splits` were given and `x` is no fake tensor.
            ValueError: on every rank, where one has an expert that there is not.
        """
        if self._local is not None:
            return self._local.dispatch(x, experts, weights)
        check_tokens(x, experts, weights)
        sizes = self._given_sizes(x, experts)
        layout = forward_layout(
            experts,
            lambda: exchange_layout(experts, weights, self.num_experts, self._peers, sizes),
        )
        rows, slot_weights = send_rows(x, weights, layout, self._peers)
        metadata = AllToAllMetadata(
            counts=layout.counts, layout=layout, weights=slot_weights, dtype=x.dtype
        )
        return expand_rows(rows, layout.arrived), metadata

    def combine(self, outputs: Tensor, metadata: AllToAllMetadata | LocalMetadata) -> Tensor:
        """Sum the weighted results of every token; see `TokenDispatcher.combine`."""
        if isinstance(metadata, LocalMetadata):
            return LocalDispatcher(self.num_experts).combine(outputs, metadata)
        check_outputs(outputs, metadata.counts)
        layout = metadata.layout
        # Two steps: a recompute ends with the first, the last one that keeps tensors.
        sums = sum_slots(outputs, metadata.weights, layout.arrived, metadata.dtype)
        return sum_at_home(sums, layout, self._peers)

    def _given_sizes(self, x: Tensor, experts: Tensor) -> ExchangeSizes | None:
        if self._splits is None:
            return None
        if not is_fake(x):
            raise TypeError(
                "splits are for planning with fake tensors; for real tokens make the dispatcher "
                "without them"
            )
        if isinstance(self._splits, ExchangeSizes):
            return self._splits
        return ExchangeSizes.even(
            tokens=experts.shape[0],
            top_k=experts.shape[1],
            num_experts=self.num_experts,
            ranks=self._peers.size,
            rank=self._peers.rank,
        )
