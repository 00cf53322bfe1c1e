"""What parallelism was asked for, and the topology that came of it."""

from shardwalk.mesh.axes import MeshAxisName
from shardwalk.mesh.checkpointing_modes import (
    ActivationCheckpointingMode,
    ActivationCheckpointingScope,
    FrozenMultimodalSharding,
    ResolvedActivationCheckpointing,
    activation_checkpointing_groups,
    merge_activation_checkpointing,
    normalize_activation_checkpointing,
    normalize_activation_checkpointing_scope,
)
from shardwalk.mesh.config import (
    DDPConfig,
    DistributedStrategyConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MoEParallelizerConfig,
    MultimodalDistributedConfig,
    MultimodalVisionConfig,
)
from shardwalk.mesh.context import MeshContext
from shardwalk.mesh.device_meshes import (
    get_cp_submeshes,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_submesh,
)
from shardwalk.mesh.distributed_setup import DistributedSetup
from shardwalk.mesh.launch import (
    DistInfo,
    initialize_distributed,
    register_teardown,
    shutdown_distributed,
)
from shardwalk.mesh.pipeline_config import PIPELINE_SCHEDULES, PipelineConfig
from shardwalk.mesh.randomness import seed_everything
from shardwalk.mesh.sizes import AxisSizes, ParallelismSizes

__all__ = [
    "PIPELINE_SCHEDULES",
    "ActivationCheckpointingMode",
    "ActivationCheckpointingScope",
    "AxisSizes",
    "DDPConfig",
    "DistInfo",
    "DistributedSetup",
    "DistributedStrategyConfig",
    "FSDP2Config",
    "FrozenMultimodalSharding",
    "MegatronFSDPConfig",
    "MeshAxisName",
    "MeshContext",
    "MoEParallelizerConfig",
    "MultimodalDistributedConfig",
    "MultimodalVisionConfig",
    "ParallelismSizes",
    "PipelineConfig",
    "ResolvedActivationCheckpointing",
    "activation_checkpointing_groups",
    "get_cp_submeshes",
    "get_flat_mesh",
    "get_fsdp_dp_mesh",
    "get_submesh",
    "initialize_distributed",
    "merge_activation_checkpointing",
    "normalize_activation_checkpointing",
    "normalize_activation_checkpointing_scope",
    "register_teardown",
    "seed_everything",
    "shutdown_distributed",
]
