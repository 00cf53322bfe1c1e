"""Every touch of a private torch API in this package. All of it was read in torch 2.13.0."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["KeepsFloat32", "in_backward", "is_fake", "products_by_bag"]

_SUM = 0  # the mode of embedding_bag


def products_by_bag(bags: Tensor, rows: Tensor, bag_of_row: Tensor) -> Tensor:
    """The scalar product of each row with its bag: [N], from bags [B, H] and rows [N, H].

    This is the weights' part of the backward of `torch.embedding_bag` (torch 2.11 to 2.13), the
    one kernel that takes these products without a gathered copy of the bags. Through the public
    function it comes only together with the gradient of the rows, which is slow.
    """
    positions = torch.arange(rows.shape[0], device=rows.device)
    products: Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        bags, rows, positions, positions, bag_of_row, _SUM
    )
    return products


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread, so that a forward in it is a recompute.

    `torch._C._current_graph_task_id` is -1 outside of one (torch 2.11 to 2.13). torch has no public
    way to ask.
    """
    return bool(torch._C._current_graph_task_id() != -1)


class KeepsFloat32(nn.Module):
    """A module whose own parameters and buffers no cast makes narrower than float32.

    `Module.to`, `.half()`, `.bfloat16()` and the like all go through `Module._apply` (torch 2.11 to
    2.13), to which torch offers no public hook. Moves and casts to float64 work as ever.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsFloat32:
        def widened(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if not tensor.is_floating_point() or out.dtype.itemsize >= 4:
                return out
            return tensor.to(out.device, torch.promote_types(tensor.dtype, torch.float32))

        super()._apply(widened, recurse)  # type: ignore[no-untyped-call]
        return self


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values, only a shape (torch 2.11 to 2.13 have no public class)."""
    return isinstance(tensor, FakeTensor)
