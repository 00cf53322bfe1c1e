"""Rows that cross between ranks, and the gradients that cross the other way.

Bringing rows to the ranks of their experts and summing what comes back are each other's backward,
so that forward and backward of a dispatch and of a combine move the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwalk.moe_ep.dispatcher.exchange_layout import ExchangeLayout, Peers
from shardwalk.moe_ep.dispatcher.row_sums import sum_rows


class SendRows(torch.autograd.Function):
    """Tokens [T, H] and weights [T, k] to arrived rows and the weights of arrived slots.

    The weights' values came with the layout. One node for both, so that every rank exchanges their
    gradients in the same order.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, layout: ExchangeLayout, peers: Peers
    ) -> tuple[Tensor, Tensor]:
        """Send each token once to every rank that has an expert of it."""
        ctx.layout, ctx.peers, ctx.dtype = layout, peers, weights.dtype
        rows, slot_weights = bring_rows(x, layout, peers), layout.weights.detach()
        outputs = (rows, slot_weights)
        ctx.mark_non_differentiable(
            *(out for out, needed in zip(outputs, ctx.needs_input_grad, strict=False) if not needed)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Send the gradients back and sum those of one token."""
        (of_rows, of_slots), of_x, of_weights = gradients, None, None
        if ctx.needs_input_grad[0]:
            of_x = return_rows(of_rows, ctx.layout, ctx.peers)
        if ctx.needs_input_grad[1]:
            of_weights = _return_weights(of_slots, ctx.layout, ctx.peers).to(ctx.dtype)
        return of_x, of_weights, None, None


class ReturnRows(torch.autograd.Function):
    """Partial sums of arrived rows [R, H] to the sums of this rank's tokens [T, H]."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, layout: ExchangeLayout, peers: Peers) -> Tensor:
        """Send each partial sum back to its token's rank and add them up."""
        ctx.layout, ctx.peers = layout, peers
        return return_rows(sums, layout, peers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Send each token's gradient to the ranks that had a part in it."""
        return bring_rows(gradients[0], ctx.layout, ctx.peers), None, None


def bring_rows(tokens: Tensor, layout: ExchangeLayout, peers: Peers) -> Tensor:
    """Send tokens [T, H] to the ranks of their experts; the arrived rows [R, H], own ones last."""
    splits = layout.row_splits
    others, own = layout.sent_tokens.tensor_split([splits.leaving])
    arrived = tokens.new_empty(splits.arriving + splits.own, tokens.shape[1])
    peers.exchange(arrived[: splits.arriving], tokens.index_select(0, others), splits)
    torch.index_select(tokens, 0, own, out=arrived[splits.arriving :])
    return arrived


def return_rows(rows: Tensor, layout: ExchangeLayout, peers: Peers) -> Tensor:
    """Send rows [R, H] back where they came from; the sum of each token's rows [T, H]."""
    returned = peers.exchange_with_own(rows, layout.row_splits.back())
    return sum_rows(returned, layout.tokens)


def _return_weights(gradients: Tensor, layout: ExchangeLayout, peers: Peers) -> Tensor:
    """Send the gradients of arrived slots [N] back to the weights [T, k] they came from."""
    in_order = gradients.index_select(0, layout.arrived.bags.members)
    returned = peers.exchange_with_own(in_order, layout.slot_splits.back())
    tokens, top_k = layout.shape
    flat = returned.new_zeros(tokens * top_k).index_copy_(0, layout.sent_slots, returned)
    return flat.view(tokens, top_k)


def send_rows(
    x: Tensor, weights: Tensor, layout: ExchangeLayout, peers: Peers
) -> tuple[Tensor, Tensor]:
    """Bring tokens to the ranks of their experts, and weights to their slots."""
    rows, slot_weights = SendRows.apply(x, weights, layout, peers)  # type: ignore[no-untyped-call]
    return rows, slot_weights


def sum_at_home(sums: Tensor, layout: ExchangeLayout, peers: Peers) -> Tensor:
    """Bring partial sums back to the ranks of their tokens and add them up."""
    tokens: Tensor = ReturnRows.apply(sums, layout, peers)  # type: ignore[no-untyped-call]
    return tokens
