"""Which keys a query sees: those before it, in its window, in its sequence, and no padding."""

from __future__ import annotations

import torch
from torch import Tensor


def sequences_of(position_ids: Tensor, is_token: Tensor | None = None) -> Tensor:
    """Number the sequences that are packed into each row by their positions, int64 [B, S].

    A new one begins at a token whose position does not follow that of the token before it: is
    neither one more, nor as many more as there are columns between the two.

    Args:
        position_ids: integer [B, S].
        is_token: bool [B, S], False for padding, whose positions mean nothing.
    """
    before, columns = _tokens_before(position_ids, is_token)
    positions = position_ids.long()
    step = positions - positions.gather(1, before.clamp(min=0))
    begins = (step != 1) & (step != columns - before)
    return _number(begins, before, is_token)


def numbered(sequence_ids: Tensor, is_token: Tensor | None = None) -> Tensor:
    """Number sequences from 0 in their order in each row, int64 [B, S].

    A new one begins at a token whose number is not that of the token before it.

    Args:
        sequence_ids: integer [B, S].
        is_token: bool [B, S], False for padding, whose numbers mean nothing.
    """
    before, _ = _tokens_before(sequence_ids, is_token)
    ids = sequence_ids.long()
    return _number(ids != ids.gather(1, before.clamp(min=0)), before, is_token)


def positions_in(sequence_ids: Tensor | None, is_token: Tensor) -> Tensor:
    """Number the tokens of each sequence from 0, int64 [B, S]; those of padding mean nothing.

    Args:
        sequence_ids: of `numbered` or `sequences_of`; None is one sequence per row.
        is_token: bool [B, S], False for padding, which is not counted.
    """
    counted = is_token.long()
    before = counted.cumsum(1) - counted
    if sequence_ids is None:
        return before
    begins = torch.ones_like(is_token)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return before - before.where(begins, 0).cummax(1).values


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
        sequence_ids: integer [B, S]; queries see keys with their own number only.
        device: of the mask.
    """
    if window is not None and window >= length:
        window = None
    if window is None and is_token is None and sequence_ids is None:
        return None
    columns = torch.arange(length, device=device)
    distance = columns[:, None] - columns
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    seen = seen[None, None]
    if sequence_ids is not None:
        seen = seen & (sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :])
    if is_token is not None:
        seen = (seen & is_token[:, None, None, :]) | (distance == 0)
    return seen


def _tokens_before(like: Tensor, is_token: Tensor | None) -> tuple[Tensor, Tensor]:
    """The column of the token before each column (-1 is none), and the columns: int64 [B, S]."""
    columns = torch.arange(like.shape[1], device=like.device).expand(like.shape)
    if is_token is None:
        return columns - 1, columns
    last = columns.where(is_token, -1).cummax(1).values
    return torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], dim=1), columns


def _number(begins: Tensor, before: Tensor, is_token: Tensor | None) -> Tensor:
    begins = begins & (before >= 0)
    return (begins if is_token is None else begins & is_token).cumsum(1)
