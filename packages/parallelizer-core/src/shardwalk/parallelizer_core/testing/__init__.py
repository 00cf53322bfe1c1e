"""Tools to test parallel models with: a pool of ranks and the parity checker.

`run_on_ranks` runs a function on N processes that form one process group; `assert_parity` trains a
`ParityCase` in one process and on a mesh, and raises unless both have the same numbers. A sidecar's
test is a case and a table of meshes::

    CASE = ParityCase(model=build_my_model, batches=TokenBatches(vocabulary=100))

    @pytest.mark.parametrize("sizes", [ParallelismSizes(), ParallelismSizes(dp_replicate_size=2)])
    def test_parity(sizes: ParallelismSizes) -> None:
        assert_parity(CASE, world_size=4, parallelism_sizes=sizes)
"""

from shardwalk.parallelizer_core.testing.models import TinyDecoder, tiny_decoder_case
from shardwalk.parallelizer_core.testing.parity import ParityError, assert_parity
from shardwalk.parallelizer_core.testing.parity_case import (
    Bf16,
    ParityCase,
    TokenBatches,
    causal_token_losses,
    count_labels,
)
from shardwalk.parallelizer_core.testing.parity_compare import Finding, Tolerance
from shardwalk.parallelizer_core.testing.parity_subject import (
    Subject,
    clip_grad_norm_torch,
    sync_always,
)
from shardwalk.parallelizer_core.testing.rank_errors import RankError, RankTimeoutError
from shardwalk.parallelizer_core.testing.rank_pool import (
    RankPool,
    preload,
    rank_pool,
    run_on_ranks,
)
from shardwalk.parallelizer_core.testing.rank_worker import cached, in_rank, rank_device

__all__ = [
    "RankPool",
    "rank_pool",
    "run_on_ranks",
    "preload",
    "cached",
    "rank_device",
    "in_rank",
    "RankError",
    "RankTimeoutError",
    "ParityCase",
    "TokenBatches",
    "causal_token_losses",
    "count_labels",
    "assert_parity",
    "ParityError",
    "Finding",
    "Tolerance",
    "Bf16",
    "Subject",
    "clip_grad_norm_torch",
    "sync_always",
    "TinyDecoder",
    "tiny_decoder_case",
]
