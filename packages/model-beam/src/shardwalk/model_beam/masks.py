"""Which keys a query sees: those before it, in its window, in its sequence, and no padding."""

from __future__ import annotations

import torch
from torch import Tensor


def sequences_of(position_ids: Tensor) -> Tensor:
    """Number the sequences that are packed into each row, int64 [B, S].

    A new one begins wherever a position does not follow the one before it.

    Args:
        position_ids: integer [B, S].
    """
    begins = torch.zeros_like(position_ids, dtype=torch.int64)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return begins.cumsum(1)


def positions_in(sequence_ids: Tensor) -> Tensor:
    """Positions that start at 0 in each packed sequence, int64 [B, S].

    Args:
        sequence_ids: integer [B, S]; neighbours with the same number are one sequence.
    """
    index = torch.arange(sequence_ids.shape[1], device=sequence_ids.device).expand_as(sequence_ids)
    begins = torch.ones_like(sequence_ids, dtype=torch.bool)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return index - index.where(begins, 0).cummax(1).values


def visible_keys(
    length: int,
    *,
    window: int | None = None,
    is_token: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor | None:
    """Who sees whom, bool [1 or B, 1, S, S] (query, key); None where causality alone decides.

    Padding is seen by nobody but itself: a query that sees no key at all has no softmax.

    Args:
        length: S.
        window: how many keys a query sees at most, itself among them; None is no limit.
        is_token: bool [B, S], False for padding.
        sequence_ids: integer [B, S]; queries see keys of their own sequence only.
        device: of the mask.
    """
    if window is not None and window >= length:
        window = None
    if window is None and is_token is None and sequence_ids is None:
        return None
    index = torch.arange(length, device=device)
    distance = index[:, None] - index
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    seen = seen[None, None]
    if sequence_ids is not None:
        seen = seen & (sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :])
    if is_token is not None:
        seen = seen & is_token[:, None, None, :] | (distance == 0)
    return seen
