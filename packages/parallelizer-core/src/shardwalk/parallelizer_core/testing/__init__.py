"""Tools to test parallel models with: a pool of ranks and the parity checker."""

from shardwalk.parallelizer_core.testing.rank_errors import RankError, RankTimeoutError
from shardwalk.parallelizer_core.testing.rank_pool import (
    RankPool,
    preload,
    rank_pool,
    run_on_ranks,
)
from shardwalk.parallelizer_core.testing.rank_worker import cached, in_rank, rank_device

__all__ = [
    "RankError",
    "RankPool",
    "RankTimeoutError",
    "cached",
    "in_rank",
    "preload",
    "rank_device",
    "rank_pool",
    "run_on_ranks",
]
