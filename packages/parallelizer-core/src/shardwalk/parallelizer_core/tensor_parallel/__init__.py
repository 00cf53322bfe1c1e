"""Tensor parallelism: plans, the styles they are made of, and what they leave whole."""

from shardwalk.parallelizer_core.tensor_parallel.embedding_styles import (
    FeatureParallel,
    VocabularyParallel,
)
from shardwalk.parallelizer_core.tensor_parallel.partial_styles import (
    LocalParameters,
    SharedTail,
    SumOutput,
)
from shardwalk.parallelizer_core.tensor_parallel.plans import register_tp_plan
from shardwalk.parallelizer_core.tensor_parallel.replicas import (
    SplitInput,
    TokenParallel,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.styles import (
    ColumnParallel,
    LocalCounts,
    RowParallel,
    SequenceBoundary,
    SharedInput,
)

__all__ = [
    "ColumnParallel",
    "FeatureParallel",
    "LocalCounts",
    "LocalParameters",
    "RowParallel",
    "SequenceBoundary",
    "SharedInput",
    "SharedTail",
    "SplitInput",
    "SumOutput",
    "TokenParallel",
    "VocabularyParallel",
    "WholeInput",
    "register_tp_plan",
]
