"""The layout of a dispatch, kept for the recompute of a checkpointed call.

Where tokens go takes an exchange of counts, one of expert numbers and weights, and a copy to the
host. A recompute that did it again would pay for it again, and a routing that came out otherwise
the second time (a tie that tips, a bias that was updated since) would change shapes under the
backward. So the layout is decided once per checkpointed call, in its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from shardwalk.parallelizer_core import record_or_replay

KEY = "dispatch"


class Layout(Protocol):
    """What a dispatcher records: plain data and tensors without a graph."""

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens of this rank, and slots of each."""
        ...


L = TypeVar("L", bound=Layout)


def forward_layout(experts: Tensor, compute: Callable[[], L]) -> L:
    """The layout that `compute` gives, or in a recompute the one that the forward recorded.

    Outside of checkpointed calls it just computes. Logs, threads and nested calls are the business
    of `record_or_replay`: one log for each checkpointed call, however many run before a backward.

    Args:
        experts: [T, k], the choice of this call; in a recompute only its shape counts.
        compute: makes the layout; its tensors require no gradient and never change.

    Raises:
        RuntimeError: a recompute dispatches other tokens than its forward.
    """
    layout = record_or_replay(KEY, compute)
    if layout.shape != tuple(experts.shape):
        raise RuntimeError(
            f"a recompute dispatches experts of shape {list(experts.shape)}, its forward of shape "
            f"{list(layout.shape)}; forward and recompute must see the same tokens"
        )
    return layout
