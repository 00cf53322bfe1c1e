"""Model-owned parallelization: the sidecar contract, the dense walk and what training needs."""

from shardwalk.parallelizer_core.fsdp2.dtype_units import fully_shard_by_dtype
from shardwalk.parallelizer_core.fsdp2.unit_order import check_unit_order
from shardwalk.parallelizer_core.fsdp2.unit_table import UnitInfo, describe_units
from shardwalk.parallelizer_core.gradients import (
    TokenNormalizer,
    clip_grad_norm_,
    get_total_norm,
    no_sync,
    sync_gradients_on_last,
)
from shardwalk.parallelizer_core.materialize import materialize
from shardwalk.parallelizer_core.model_parallelizer import (
    compile_parallelized_model,
    get_model_parallelizer,
    parallelize_model,
    register_parallelizer,
)
from shardwalk.parallelizer_core.parallelizer import ModelParallelizer
from shardwalk.parallelizer_core.protocols import FinalizesParallelization

__all__ = [
    "FinalizesParallelization",
    "ModelParallelizer",
    "TokenNormalizer",
    "UnitInfo",
    "check_unit_order",
    "clip_grad_norm_",
    "compile_parallelized_model",
    "describe_units",
    "fully_shard_by_dtype",
    "get_model_parallelizer",
    "get_total_norm",
    "materialize",
    "no_sync",
    "parallelize_model",
    "register_parallelizer",
    "sync_gradients_on_last",
]
