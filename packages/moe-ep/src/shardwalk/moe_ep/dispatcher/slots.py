"""Slots: one copy of a row for each expert that it goes to, sorted by expert.

The rows are the tokens themselves where all experts are on this rank, else those that arrived here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwalk.moe_ep.dispatcher.row_sums import (
    Bags,
    row_products,
    sum_rows,
    weighted_copies,
    weighted_sum_rows,
)


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    """Where the slots of this rank's experts come from.

    Attributes:
        order: int64 [N], for each slot, sorted by expert, its number before it was sorted.
        rows: int64 [N], the row of each slot.
        bags: the slots of each row.
    """

    order: Tensor
    rows: Tensor
    bags: Bags


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(
        0, order, torch.arange(order.shape[0], device=order.device)
    )


def starts_of(sizes: Tensor) -> Tensor:
    """Where each of several consecutive pieces begins."""
    return sizes.cumsum(0) - sizes


class ExpandRows(torch.autograd.Function):
    """Rows [R, H] to slots [N, H]; the gradients of a row's slots are summed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layout: SlotLayout) -> Tensor:
        """Copy each row to its slots."""
        ctx.layout = layout
        return rows.index_select(0, layout.rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sum over the slots of each row."""
        return sum_rows(gradients[0], ctx.layout.bags), None


class SumSlots(torch.autograd.Function):
    """Outputs [N, H] and weights [N] of slots to the weighted sums [R, H] of their rows."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, weights: Tensor, layout: SlotLayout, dtype: torch.dtype
    ) -> Tensor:
        """Sum weight times output over the slots of each row."""
        # Without a gradient for the weights the outputs need not be kept.
        ctx.save_for_backward(weights, outputs if ctx.needs_input_grad[1] else None)
        ctx.layout, ctx.dtype = layout, outputs.dtype
        return weighted_sum_rows(outputs, weights, layout.bags, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Give each slot its weight times the row's gradient, and each weight a product."""
        (sums,), (weights, outputs), of_slots, of_weights = gradients, ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0]:
            of_slots = weighted_copies(sums, ctx.layout.rows, weights, ctx.dtype)
        if outputs is not None:
            of_weights = row_products(sums, outputs, ctx.layout.rows).to(weights.dtype)
        return of_slots, of_weights, None, None


def expand_rows(rows: Tensor, layout: SlotLayout) -> Tensor:
    """Copy each row to its slots, sorted by expert: [N, H]."""
    slots: Tensor = ExpandRows.apply(rows, layout)  # type: ignore[no-untyped-call]
    return slots


def sum_slots(outputs: Tensor, weights: Tensor, layout: SlotLayout, dtype: torch.dtype) -> Tensor:
    """Sum weight times output over the slots of each row: [R, H] in `dtype`."""
    sums: Tensor = SumSlots.apply(outputs, weights, layout, dtype)  # type: ignore[no-untyped-call]
    return sums
