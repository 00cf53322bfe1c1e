"""Model-owned parallelization: the sidecar contract, the dense walk and what training needs."""

from shardwalk.parallelizer_core.activation_checkpointing import apply_activation_checkpointing
from shardwalk.parallelizer_core.checkpoint import (
    LoadedCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from shardwalk.parallelizer_core.compile import CompiledBlocks, describe_compiled
from shardwalk.parallelizer_core.export import export_safetensors
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
from shardwalk.parallelizer_core.loss_parallel import keep_logits_split, parallel_cross_entropy
from shardwalk.parallelizer_core.materialize import materialize
from shardwalk.parallelizer_core.megatron_fsdp import shard_optimizer
from shardwalk.parallelizer_core.model_parallelizer import (
    compile_parallelized_model,
    get_model_parallelizer,
    parallelize_model,
    register_parallelizer,
)
from shardwalk.parallelizer_core.non_persistent_buffers import ComputesBuffers
from shardwalk.parallelizer_core.optimizer_state import (
    load_optimizer_state_dict,
    optimizer_state_dict,
)
from shardwalk.parallelizer_core.parallelizer import ModelParallelizer
from shardwalk.parallelizer_core.protocols import (
    FinalizesParallelization,
    HasCheckpointContext,
    HasOpsToSave,
)
from shardwalk.parallelizer_core.recompute_replay import (
    is_recomputing,
    not_kept,
    record_or_replay,
    replay_contexts,
)
from shardwalk.parallelizer_core.start_values import check_equal_start
from shardwalk.parallelizer_core.state_dict_adapter import (
    RenamingAdapter,
    StateDictAdapter,
    read_concatenated,
)
from shardwalk.parallelizer_core.state_dicts import load_model_state_dict, model_state_dict
from shardwalk.parallelizer_core.state_mismatch import StateMismatchError
from shardwalk.parallelizer_core.tensor_parallel import register_tp_plan

__all__ = [
    "CompiledBlocks",
    "ComputesBuffers",
    "FinalizesParallelization",
    "HasCheckpointContext",
    "HasOpsToSave",
    "LoadedCheckpoint",
    "ModelParallelizer",
    "RenamingAdapter",
    "StateDictAdapter",
    "StateMismatchError",
    "TokenNormalizer",
    "UnitInfo",
    "apply_activation_checkpointing",
    "check_equal_start",
    "check_unit_order",
    "clip_grad_norm_",
    "compile_parallelized_model",
    "describe_compiled",
    "describe_units",
    "export_safetensors",
    "fully_shard_by_dtype",
    "get_model_parallelizer",
    "get_total_norm",
    "is_recomputing",
    "keep_logits_split",
    "load_checkpoint",
    "load_model_state_dict",
    "load_optimizer_state_dict",
    "materialize",
    "model_state_dict",
    "no_sync",
    "not_kept",
    "optimizer_state_dict",
    "parallel_cross_entropy",
    "parallelize_model",
    "read_concatenated",
    "record_or_replay",
    "register_parallelizer",
    "register_tp_plan",
    "replay_contexts",
    "save_checkpoint",
    "shard_optimizer",
    "sync_gradients_on_last",
]
