"""Work that ranks do side by side, and that fails on all of them when it fails on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def on_all_ranks(work: Callable[[], _T], group: dist.ProcessGroup | None) -> _T:
    """Do this rank's work and wait for that of all others; a failure anywhere raises everywhere.

    A TypeError or ValueError, which is about what this rank was given, is raised as it is here.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return work()
    failure: str | None = None
    result: Any = None
    own: Exception | None = None
    try:
        result = work()
    except Exception as error:
        own, failure = error, f"rank {dist.get_rank()}: {error!r}"
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    if isinstance(own, TypeError | ValueError):
        raise own
    if any(failures):
        raise RuntimeError(f"saving failed on {'; '.join(filter(None, failures))}") from own
    done: _T = result
    return done
