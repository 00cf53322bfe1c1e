"""What every dispatcher does, and what it checks first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DispatchMetadata:
    """What `combine` needs of the `dispatch` before it; each dispatcher adds what it needs.

    Attributes:
        counts: rows of each expert of this rank, on the host; the rows of one expert follow each
            other, in the order of the experts.
    """

    counts: list[int]


class TokenDispatcher(Protocol):
    """Brings tokens to the rank that holds their experts, and the weighted results back.

    A dispatcher holds no parameters and nothing of a call: the metadata holds all of that, so that
    any number of calls may lie between a `dispatch` and its `combine`.
    """

    def dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, DispatchMetadata]:
        """Bring every token to its experts.

        Args:
            x: [T, H], this rank's tokens; T may differ from rank to rank and be 0.
            experts: int64 [T, k], experts of all ranks by number; -1 drops the slot.
            weights: fp32 [T, k]; gradient flows through them in `combine`.

        Returns:
            Rows [N, H] for the experts of this rank, those of one expert together, and metadata.

        Raises:
            ValueError: the shapes don't fit each other.
            TypeError: `experts` are no integers.
        """
        ...

    def combine(self, outputs: Tensor, metadata: Any) -> Tensor:
        """Bring the results back: each token's sum over its slots of weight times output.

        Args:
            outputs: [N, H], what the experts made of the rows.
            metadata: of the `dispatch` that gave the rows.

        Returns:
            [T, H] in the dtype of the tokens; zeros for a token whose slots were all dropped. Sums
            are made in fp32.
        """
        ...


def check_tokens(x: Tensor, experts: Tensor, weights: Tensor) -> None:
    """Raise unless these are [T, H], integers [T, k] and floats [T, k]."""
    shapes = f"x {list(x.shape)}, experts {list(experts.shape)}, weights {list(weights.shape)}"
    if x.dim() != 2 or experts.dim() != 2 or x.shape[0] != experts.shape[0]:
        raise ValueError(
            f"dispatch takes x [T, H], experts [T, k] and weights [T, k], not {shapes}"
        )
    if experts.shape != weights.shape:
        raise ValueError(f"experts and weights must have one shape [T, k], not {shapes}")
    if experts.dtype not in (torch.int64, torch.int32) or not weights.is_floating_point():
        raise TypeError(
            f"experts must be int64 or int32 and weights floats (fp32), not {experts.dtype} and "
            f"{weights.dtype}"
        )


def check_outputs(outputs: Tensor, counts: Sequence[int]) -> None:
    """Raise unless there is one output for each row that was dispatched."""
    if outputs.dim() != 2 or outputs.shape[0] != sum(counts):
        raise ValueError(
            f"combine takes one output for each of the {sum(counts)} dispatched rows, not a tensor "
            f"of shape {list(outputs.shape)}"
        )


def check_num_experts(num_experts: int, ranks: int) -> None:
    """Raise unless the experts divide evenly over the ranks."""
    if num_experts < 1 or num_experts % ranks:
        divisors = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
        raise ValueError(
            f"ep_size={ranks} does not divide num_experts={num_experts}; use one of {divisors}"
        )
