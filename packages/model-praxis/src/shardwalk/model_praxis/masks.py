"""Who may attend to whom: one rule over tags, as a dense mask or as one for flex attention.

A sequence is described by slots, a slot's tokens by tags. A rule is a pure function of the tags of
queries and keys, so that both forms of a mask come from the same words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

SlotKind = Literal["global", "noised", "clean"]
Mask = Tensor | BlockMask

GLOBAL, NOISED, CLEAN = range(3)
_KINDS = {"global": GLOBAL, "noised": NOISED, "clean": CLEAN}
_CACHED_MASKS = 64


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A run of tokens of one kind.

    Attributes:
        kind: "global" tokens belong to no chunk, "noised" and "clean" ones to that of their frame.
        frames: how many frames there are (of a global slot: 1).
        tokens_per_frame: how many tokens each has.
        frames_per_chunk: after how many frames the next chunk begins; frame 0 begins chunk 0.
    """

    kind: SlotKind
    frames: int
    tokens_per_frame: int
    frames_per_chunk: int = 1

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return self.frames * self.tokens_per_frame


Layout = tuple[Slot, ...]


class Tags(NamedTuple):
    """What rules see of tokens; int32 tensors of one shape.

    Attributes:
        kind: GLOBAL, NOISED or CLEAN.
        chunk: -1 for global tokens.
        frame: -1 for global tokens.
    """

    kind: Tensor
    chunk: Tensor
    frame: Tensor

    def at(self, index: Tensor) -> Tags:
        """The tags of some tokens."""
        return Tags(self.kind[index], self.chunk[index], self.frame[index])


Rule = Callable[[Tags, Tags], Tensor]
"""From tags of queries and keys, which broadcast, to bool: whether the query sees the key."""


def tags_of(layout: Sequence[Slot], device: torch.device | str = "cpu") -> Tags:
    """The tags of a sequence of slots; int32 [tokens] each."""
    parts = [_tags_of_slot(slot, device) for slot in layout]
    return Tags(*(torch.cat(column) for column in zip(*parts, strict=True)))


def chunk_causal_rule(query: Tags, key: Tags) -> Tensor:
    """Teacher forcing: a chunk is denoised from the globals and the clean chunks before it.

    Everything sees the global tokens, and these see nothing else (they would carry a chunk's own
    clean copy to it). A noised chunk sees itself and earlier clean ones, a clean one itself and
    earlier clean ones.
    """
    is_noised = query.kind == NOISED
    sees_noised = is_noised & (key.kind == NOISED) & (key.chunk == query.chunk)
    sees_clean = (query.kind == CLEAN) & (key.kind == CLEAN) & (key.chunk <= query.chunk)
    sees_past = is_noised & (key.kind == CLEAN) & (key.chunk < query.chunk)
    return (key.kind == GLOBAL) | sees_noised | sees_clean | sees_past


def expert_self_rule(query: Tags, key: Tags) -> Tensor:
    """Tokens of the action expert see those of their own chunk."""
    return query.chunk == key.chunk


def expert_cross_rule(query: Tags, key: Tags) -> Tensor:
    """A token of the action expert sees globals, earlier clean chunks and its own noised one."""
    sees_noised = (key.kind == NOISED) & (key.chunk == query.chunk)
    sees_past = (key.kind == CLEAN) & (key.chunk < query.chunk)
    return (key.kind == GLOBAL) | sees_noised | sees_past


def attention_mask(
    rule: Rule, queries: Layout, keys: Layout | None = None, *, device: torch.device | str
) -> Mask:
    """The mask of a rule in the form that attention on a device takes.

    The last 64 are kept by rule, layouts and device.

    Args:
        rule: who sees whom.
        queries: the slots of the queries.
        keys: those of the keys; None for those of the queries.
        device: where the tokens are.

    Returns:
        On CUDA a `BlockMask`, elsewhere a bool tensor [queries, keys].
    """
    device = torch.device(device)
    layouts = (queries, queries if keys is None else keys)
    build = flex_mask if device.type == "cuda" else dense_mask
    return _cache.get((rule, *layouts, device), lambda: build(rule, *layouts, device=device))


def dense_mask(
    rule: Rule, queries: Layout, keys: Layout, *, device: torch.device | str = "cpu"
) -> Tensor:
    """bool [queries, keys], True where the query sees the key."""
    query, key = tags_of(queries, device), tags_of(keys, device)
    columns = Tags(*(column[:, None] for column in query))
    return rule(columns, key)


def flex_mask(
    rule: Rule, queries: Layout, keys: Layout, *, device: torch.device | str = "cpu"
) -> BlockMask:
    """The same for flex attention, for every batch and head."""
    query, key = tags_of(queries, device), tags_of(keys, device)

    def mask_mod(batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        return rule(query.at(query_index), key.at(key_index))

    lengths = (len(query.kind), len(key.kind))
    return create_block_mask(mask_mod, None, None, *lengths, device=str(device))


class _MaskCache:
    """The masks used last, by what they were made of."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, Lock()
        self._masks: OrderedDict[object, Mask] = OrderedDict()

    def get(self, key: object, build: Callable[[], Mask]) -> Mask:
        """The mask kept for `key`, or a new one."""
        with self._lock:
            mask = self._masks.pop(key, None)
            if mask is None:
                with torch.inference_mode(False):  # a later training step may save it
                    mask = build()
            self._masks[key] = mask
            if len(self._masks) > self._size:
                self._masks.popitem(last=False)
            return mask


_cache = _MaskCache(_CACHED_MASKS)


def _tags_of_slot(slot: Slot, device: torch.device | str) -> Tags:
    frame = torch.arange(slot.frames, dtype=torch.int32, device=device)
    frame = frame.repeat_interleave(slot.tokens_per_frame)
    kind = torch.full_like(frame, _KINDS[slot.kind])
    if slot.kind == "global":
        nowhere = torch.full_like(frame, -1)
        return Tags(kind, nowhere, nowhere)
    return Tags(kind, frame // slot.frames_per_chunk, frame)
