"""The arguments of the dense path that a mesh context stands for."""

from __future__ import annotations

from typing import Any

from shardwalk.mesh import FSDP2Config, MeshContext


def fsdp2_config(mesh_context: MeshContext) -> FSDP2Config:
    """The FSDP2 strategy of `mesh_context`; a mesh without a strategy means the default one."""
    strategy = mesh_context.strategy_config
    return strategy if isinstance(strategy, FSDP2Config) else FSDP2Config()


def apply_arguments(mesh_context: MeshContext) -> dict[str, Any]:
    """The keyword arguments of `ModelParallelizer._apply` that `mesh_context` asks for."""
    config = fsdp2_config(mesh_context)
    return {
        "mp_policy": config.mp_policy,
        "offload_policy": config.offload_policy,
        "sequence_parallel": config.sequence_parallel,
        "activation_checkpointing": mesh_context.activation_checkpointing,
        "tp_shard_plan": config.tp_plan,
        "enable_async_tensor_parallel": config.enable_async_tensor_parallel,
        "enable_compile": config.enable_compile,
        "enable_fsdp2_prefetch": config.enable_fsdp2_prefetch,
        "fsdp2_backward_prefetch_depth": config.fsdp2_backward_prefetch_depth,
        "fsdp2_forward_prefetch_depth": config.fsdp2_forward_prefetch_depth,
        "reshard_after_forward": config.reshard_after_forward,
        "activation_checkpointing_scope": config.activation_checkpointing_scope,
        "frozen_multimodal_sharding": config.multimodal.frozen_sharding,
        "reapply_trainability": mesh_context.reapply_trainability,
    }
