"""Pools of ranks for the GPU tests: one rank per GPU, for each number of GPUs that is there."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Sequence

import pytest
import torch

from shardwalk.parallelizer_core.testing import RankPool

# "gloo" runs the tables on CPU ranks: to try out the tests themselves where there is no GPU.
BACKEND = os.environ.get("SHARDWALK_GPU_TESTS_BACKEND", "nccl")
_RANKS = torch.cuda.device_count() if BACKEND == "nccl" else 4


def worlds(*sizes: int) -> list[object]:
    """Parameters of a test, one per number of ranks; those without enough GPUs are skipped."""
    return [_world(size) for size in sizes]


def meshes(*rows: Sequence[object]) -> list[object]:
    """Parameters of a test whose rows begin with the number of ranks."""
    return [_world(*row) for row in rows]


def _world(size: object, *others: object) -> object:
    assert isinstance(size, int)
    skip = pytest.mark.skipif(size > _RANKS, reason=f"needs {size} GPUs, and {_RANKS} are here")
    return pytest.param(size, *others, marks=skip, id="x".join(map(str, (size, *others))))


@functools.cache
def gpu_pool(world_size: int) -> RankPool:
    """The pool of that many ranks; the first collective of a GPU may take a while.

    Warnings are no errors: the torch here may be older or newer than the tested one.
    """
    pool = RankPool(
        world_size,
        backend=BACKEND,
        timeout=180.0,
        collective_timeout=60.0,
        start_timeout=180.0,
        warnings_as_errors=False,
    )
    atexit.register(pool.close)
    return pool
