"""The expert-parallel walk: experts onto the ep axis, all else where the dense walk puts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwalk.mesh import MeshContext, MoEParallelizerConfig
from shardwalk.mesh.policies import default_mp_policy
from shardwalk.moe_ep.dense_sharding import check_inner_root, shard_around_experts
from shardwalk.moe_ep.expert_units import expert_mesh
from shardwalk.moe_ep.heads import check_head, pin_head
from shardwalk.moe_ep.spreading import ExpertOptions, ExpertSpread, warn_of_new_routes
from shardwalk.moe_ep.tokens_over_tp import plan_with_experts
from shardwalk.parallelizer_core import ModelParallelizer
from shardwalk.parallelizer_core.fp32_pins import pin_fp32_parameters
from shardwalk.parallelizer_core.fsdp2.options import apply_arguments


def parallelize_experts(
    model: nn.Module, mesh_context: MeshContext, sidecar: ModelParallelizer
) -> nn.Module:
    """Spread the experts of `model` over the ep axis, and take the dense path with the rest.

    Each rank holds a contiguous block of experts, sharded over ep_shard and replicated over
    ep_replicate, in a unit apart from its block's.

    Args:
        model: changed in place.
        mesh_context: has a moe mesh.
        sidecar: makes every unit by its `_fully_shard_module`, and the dense ones by its `_apply`.

    Raises:
        ValueError: experts or options that do not fit, before anything is changed.
    """
    spread = ExpertSpread.plan(model, expert_mesh(mesh_context))
    layers, options = spread.layers, WalkOptions.of(mesh_context)
    arguments = options.dense
    arguments["tp_shard_plan"] = plan_with_experts(model, layers, mesh_context, sidecar)
    check_head(model, options.config, options.mp_policy)
    if not options.config.wrap_outer_model:
        check_inner_root(model)
    if mesh_context.reapply_trainability is not None:
        mesh_context.reapply_trainability(model)
    pin_head(model, options.config)
    pin_fp32_parameters(model)
    spread.apply(options.for_experts(), door=sidecar._fully_shard_module)
    assert mesh_context.device_mesh is not None
    sidecar = shard_around_experts(sidecar, wraps_outer=options.config.wrap_outer_model)
    return sidecar._apply(model, mesh_context.device_mesh, **arguments)


@dataclass(frozen=True, kw_only=True)
class WalkOptions:
    """What the context asks of the walk, with the overrides of its config for experts.

    Attributes:
        config: the config for experts.
        dense: the arguments of the dense path.
        mp_policy: of every unit.
    """

    config: MoEParallelizerConfig
    dense: dict[str, Any]
    mp_policy: MixedPrecisionPolicy

    @classmethod
    def of(cls, mesh_context: MeshContext) -> WalkOptions:
        """Merge the strategy's options and the config for experts."""
        config = mesh_context.moe_parallel_config or MoEParallelizerConfig()
        dense = apply_arguments(mesh_context)
        if config.mp_policy is not None:
            dense["mp_policy"] = config.mp_policy
        if dense["reshard_after_forward"] is None:
            dense["reshard_after_forward"] = config.reshard_after_forward
        if dense["activation_checkpointing"] and not config.ignore_router_for_ac:
            warn_of_new_routes("MoEParallelizerConfig.ignore_router_for_ac", stacklevel=6)
        return cls(
            config=config,
            dense=dense,
            mp_policy=dense["mp_policy"] or default_mp_policy(),
        )

    def for_experts(self) -> ExpertOptions:
        """The part of it that experts need."""
        return ExpertOptions(
            mp_policy=self.mp_policy,
            offload_policy=self.dense["offload_policy"],
            reshard_after_forward=self.dense["reshard_after_forward"],
            activation_checkpointing=self.dense["activation_checkpointing"],
            replays_routing=self.config.ignore_router_for_ac,
        )
