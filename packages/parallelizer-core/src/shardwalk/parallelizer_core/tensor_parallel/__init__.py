"""Tensor parallelism: plans, the styles they are made of, and what they leave whole."""

from shardwalk.parallelizer_core.tensor_parallel.embedding_styles import (
    FeatureParallel,
    VocabularyParallel,
)
from shardwalk.parallelizer_core.tensor_parallel.plans import register_tp_plan
from shardwalk.parallelizer_core.tensor_parallel.replicas import SplitInput, WholeInput
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
    "RowParallel",
    "SequenceBoundary",
    "SharedInput",
    "SplitInput",
    "VocabularyParallel",
    "WholeInput",
    "register_tp_plan",
]
