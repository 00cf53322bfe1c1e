"""One matrix product per group of rows, each with the weight of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_GROUPED_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),  # for others torch loops itself, and waits for the offsets first
}
_ALIGNMENT = 16  # bytes that strides and addresses of a grouped product must be a multiple of


class RowGroups:
    """How many rows each group has: rows of one group follow each other, groups in order.

    Args:
        counts: the rows of each group, on the host; 0 is allowed.
        device: where the rows are.

    Raises:
        ValueError: for a negative count.
    """

    def __init__(self, counts: Sequence[int] | Tensor, device: torch.device) -> None:
        self.counts: list[int] = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        if any(count < 0 for count in self.counts):
            raise ValueError(f"counts={self.counts} must be 0 or more each")
        self.total = sum(self.counts)
        ends = torch.tensor(self.counts, dtype=torch.int64).cumsum(0)
        self.ends = ends.to(device=device, dtype=torch.int32)


def grouped_linear(
    rows: Tensor, weight: Tensor, groups: RowGroups, bias: Tensor | None = None
) -> Tensor:
    """``rows @ weight[g].T + bias[g]`` for the rows of each group g.

    Where torch's grouped product takes the operands it is the fastest there is (on one thread of a
    CPU 0.63-0.97 of the time of a loop, forward and backward, at 2 to 1024 rows a group); else a
    loop, over `unbind`: the backward of a select would fill the whole weight once per group.

    Args:
        rows: [N, K]; rows after those of the last group belong to nobody and give zeros.
        weight: [G, M, K].
        groups: G groups.
        bias: [G, M].

    Returns:
        [N, M]. Every operand gets a gradient, zeros where no row meant it, also when N is 0.

    Raises:
        ValueError: the groups are not as many as the weights, or have more rows than there are.
    """
    _check(rows, weight, groups)
    extra = rows.shape[0] - groups.total
    used = rows[: groups.total] if extra else rows
    if _fits(used, weight):
        result = F.grouped_mm(used, weight.transpose(1, 2), offs=groups.ends)
        result = _ContiguousGradient.apply(result)  # type: ignore[no-untyped-call]
    else:
        parts = zip(used.split(groups.counts), weight.unbind(0), strict=True)
        result = torch.cat([part @ matrix.t() for part, matrix in parts])
    if bias is not None:
        per_row = zip(bias.unbind(0), groups.counts, strict=True)
        result = result + torch.cat([each.expand(count, -1) for each, count in per_row])
    return F.pad(result, (0, 0, 0, extra)) if extra else result


def _check(rows: Tensor, weight: Tensor, groups: RowGroups) -> None:
    if len(groups.counts) != weight.shape[0]:
        raise ValueError(f"{len(groups.counts)} counts were given for {weight.shape[0]} experts")
    if groups.total > rows.shape[0]:
        raise ValueError(
            f"counts={groups.counts} add up to {groups.total} rows, and there are {rows.shape[0]}"
        )


def _fits(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product takes these operands and, in the backward, gradients."""
    device = rows.device.type
    return (
        rows.dtype == weight.dtype
        and rows.dtype in _GROUPED_DTYPES.get(device, ())
        and not torch.is_autocast_enabled(device)
        and all(size * rows.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
        and all(_is_aligned(operand) for operand in (rows, weight))
    )


def _is_aligned(operand: Tensor) -> bool:
    offset = operand.storage_offset() * operand.element_size()
    return operand.is_contiguous() and offset % _ALIGNMENT == 0


class _ContiguousGradient(torch.autograd.Function):
    """Passes its input on; the backward of a grouped product takes no expanded gradient."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient.contiguous()
