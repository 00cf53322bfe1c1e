"""The expert-parallel walk: experts onto the ep axis, all else where the dense walk puts it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwalk.mesh import MeshContext, MoEParallelizerConfig
from shardwalk.mesh.policies import default_mp_policy
from shardwalk.moe_ep.dense_sharding import check_inner_root, shard_around_experts
from shardwalk.moe_ep.dispatcher import TokenDispatcher, make_dispatcher
from shardwalk.moe_ep.expert_layers import ExpertLayer, find_expert_layers, refuse_layers
from shardwalk.moe_ep.expert_units import ExpertMesh, expert_mesh, shard_experts
from shardwalk.moe_ep.expert_weights import LocalExperts, cut_over_ep, run_on_local_weights
from shardwalk.moe_ep.heads import check_head, pin_head
from shardwalk.moe_ep.huggingface import exchange_experts, recompute_writers
from shardwalk.moe_ep.tokens_over_tp import plan_with_experts
from shardwalk.parallelizer_core import ModelParallelizer, replay_contexts
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
    mesh = expert_mesh(mesh_context)
    layers = find_expert_layers(model, ep_size=mesh.ep.size())
    options = WalkOptions.of(mesh_context)
    refuse_layers(model, layers, ep_size=mesh.ep.size(), shard_size=mesh.shard_size)
    dispatchers = [_dispatcher_of(layer, mesh) for layer in layers]
    arguments = options.dense
    arguments["tp_shard_plan"] = plan_with_experts(model, layers, mesh_context, sidecar)
    check_head(model, options.config, options.mp_policy)
    if not options.config.wrap_outer_model:
        check_inner_root(model)
    if mesh_context.reapply_trainability is not None:
        mesh_context.reapply_trainability(model)
    pin_head(model, options.config)
    pin_fp32_parameters(model)
    for layer, dispatcher in zip(layers, dispatchers, strict=True):
        _spread(layer, dispatcher, mesh, options)
        shard_experts(
            layer.weights,
            mesh,
            door=sidecar._fully_shard_module,
            mp_policy=options.mp_policy,
            offload_policy=options.offload_policy,
            reshard_after_forward=options.dense["reshard_after_forward"],
        )
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
        replays_routing: whether recomputes take the choices of their forwards.
    """

    config: MoEParallelizerConfig
    dense: dict[str, Any]
    mp_policy: MixedPrecisionPolicy
    replays_routing: bool

    @property
    def offload_policy(self) -> OffloadPolicy | None:
        """Where shards rest."""
        policy: OffloadPolicy | None = self.dense["offload_policy"]
        return policy

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
            warnings.warn(
                "MoEParallelizerConfig.ignore_router_for_ac=False: recomputes route tokens anew, "
                "and where a choice comes out otherwise than in the forward, gradients are wrong; "
                "use ignore_router_for_ac=True",
                UserWarning,
                stacklevel=6,
            )
        return cls(
            config=config,
            dense=dense,
            mp_policy=dense["mp_policy"] or default_mp_policy(),
            replays_routing=config.ignore_router_for_ac and bool(dense["activation_checkpointing"]),
        )


def _dispatcher_of(layer: ExpertLayer, mesh: ExpertMesh) -> TokenDispatcher:
    name = "auto" if layer.moe is None else layer.moe.config.dispatcher
    return make_dispatcher(name, layer.num_experts, mesh.ep)


def _spread(
    layer: ExpertLayer, dispatcher: TokenDispatcher, mesh: ExpertMesh, options: WalkOptions
) -> None:
    """Cut the experts of a layer, and let them get their tokens from all ranks of the ep axis."""
    cut_over_ep(layer.weights, mesh.ep)
    local = LocalExperts(
        weights=layer.weights, ep_size=mesh.ep.size(), gradient_factor=mesh.gradient_factor
    )
    # Recomputes take the layout of the dispatch from their forward in any case.
    vars(layer.holder)["checkpoint_context"] = replay_contexts
    moe = layer.moe
    if moe is not None:
        moe.set_dispatcher(dispatcher)
        moe.gate.replay_routing = options.config.ignore_router_for_ac
        run_on_local_weights(local)
    else:
        if options.dense["activation_checkpointing"] == "selective":
            recompute_writers(layer.holder, layer.weights)
        exchange_experts(
            local,
            dispatcher,
            row_dtype=_row_dtype(options.mp_policy),
            replays_routing=options.replays_routing,
        )


def _row_dtype(policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """What experts' rows are cast to where units cast their inputs."""
    return policy.param_dtype if policy.cast_forward_inputs else None
