"""Buffers in a checkpointed call, which runs twice and must update them once.

Running statistics and counters are written by the forward. Its recompute starts from what they were
then, and leaves them as it found them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from shardwalk.parallelizer_core._torch_compat import buffers_of

Buffers = dict[str, Tensor | None]


class BuffersOfForward(AbstractContextManager[None]):
    """While entered, `module` has copies of the buffers it had when this was made.

    The tensors themselves are put aside and never written, so that a graph which holds one stays
    valid. May be entered again and inside itself. Which buffers a forward will write is not known
    before (some of torch's own operators don't count as writes), so every one is copied; one that
    requires grad, in whose place no copy can stand, is taken as it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._live = [buffers_of(each) for each in module.modules()]
        self._before = _copies(self._live)
        self._aside: list[list[Buffers]] = []

    def __enter__(self) -> None:
        self._aside.append([dict(buffers) for buffers in self._live])
        self._show(_copies(self._before))

    def __exit__(self, *unused: object) -> None:
        self._show(self._aside.pop())

    def _show(self, shown: list[Buffers]) -> None:
        for live, buffers in zip(self._live, shown, strict=True):
            if live or buffers:
                live.clear()
                live.update(buffers)


def _copies(found: list[Buffers]) -> list[Buffers]:
    """Copies, in which one tensor under several names stays one."""
    made: dict[int, Tensor] = {}

    def copy(buffer: Tensor | None) -> Tensor | None:
        if buffer is None or buffer.requires_grad:
            return buffer
        if id(buffer) not in made:
            made[id(buffer)] = buffer.clone()
        return made[id(buffer)]

    with torch.no_grad():
        return [{name: copy(buffer) for name, buffer in each.items()} for each in found]
