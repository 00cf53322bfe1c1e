"""How the policy is sharded: three stacks of blocks, experts over an ep axis, the root last.

What is done to experts, to blocks that are recomputed and to units of more than one dtype is
moe-ep's and core's; this module knows where the policy keeps its blocks, and that they cast their
own hidden states, since rotary tables, modulation and times come in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwalk import moe_ep
from shardwalk.mesh import MeshContext
from shardwalk.model_praxis.policy_parts import block_lists as _block_lists
from shardwalk.model_praxis.policy_parts import expert_meshes as _expert_meshes
from shardwalk.model_praxis.policy_parts import moe_of as _moe_of
from shardwalk.model_praxis.policy_parts import policy_in as _policy
from shardwalk.model_praxis.policy_walk import PolicyWalk, walk_policy
from shardwalk.model_praxis.walk_options import (
    DenseOptions,
    refuse_arguments,
    refuse_moe_config,
)
from shardwalk.model_praxis.walk_options import mp_policy_or_default as _mp_policy
from shardwalk.moe_ep.spreading import warn_of_new_routes
from shardwalk.moe_ep.walk import WalkOptions
from shardwalk.parallelizer_core import ModelParallelizer
from shardwalk.parallelizer_core.activation_checkpointing import refuse_checkpointing
from shardwalk.parallelizer_core.fsdp2.walk import finish_units
from shardwalk.parallelizer_core.refusals import refuse_model, refuse_offload, refuse_unshardable

if TYPE_CHECKING:  # the policy's class carries the sidecar
    from shardwalk.model_praxis.model import PraxisPolicy

__all__ = [
    "PraxisModelParallelizer",
    "_block_lists",
    "_expert_meshes",
    "_moe_of",
    "_mp_policy",
    "_policy",
    "replicate_router_biases",
    "shard_policy",
]


class PraxisModelParallelizer(ModelParallelizer):
    """The sidecar of `PraxisPolicy`, which walks its three stacks as `shard_policy` does.

    Without expert parallelism the experts stay in the units of their blocks. Options that mean
    nothing for the policy are refused by name.
    """

    def _apply(  # type: ignore[override]  # core passes every option by name
        self,
        model: nn.Module,
        device_mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        sequence_parallel: bool = False,
        activation_checkpointing: bool | str = False,
        reshard_after_forward: bool | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        """Shard over the data-parallel ranks.

        Args:
            model: the policy, or a module that holds it and no other parameters; changed in place.
            device_mesh: the root mesh.
            mp_policy: None is bf16 compute with fp32 reduction.
            reshard_after_forward: True or False for every unit; None frees every block but the
                last of a stack, as in any model.
            kwargs: the other arguments of `ModelParallelizer._apply`; what it names for tensor
                parallelism, compiling and frozen towers must be at its default.

        Raises:
            ValueError: for an option, or a mesh, that the policy cannot have.
            TypeError: for an argument that `ModelParallelizer._apply` has not.
        """
        options = DenseOptions(
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            sequence_parallel=sequence_parallel,
            activation_checkpointing=activation_checkpointing,
            reshard_after_forward=reshard_after_forward,
            **kwargs,
        )
        options.refuse(device_mesh)
        walk = PolicyWalk.of(options, self, options.data_mesh(device_mesh))
        return walk_policy(model, device_mesh, walk, options.reapply_trainability)

    def _apply_moe(self, model: nn.Module, mesh_context: MeshContext) -> nn.Module:
        """Shard as a context with experts asks for, over its meshes.

        Raises:
            ValueError: as in `_apply`, and for experts that the ep axis cannot hold.
        """
        device_mesh = mesh_context.device_mesh
        assert device_mesh is not None
        given = WalkOptions.of(mesh_context)
        refuse_moe_config(given.config)
        options = DenseOptions(**given.dense)
        options.refuse(device_mesh)
        walk = replace(
            PolicyWalk.of(options, self, options.data_mesh(device_mesh)),
            moe_mesh=mesh_context.moe_mesh,
            ignore_router_for_ac=given.config.ignore_router_for_ac,
        )
        return walk_policy(model, device_mesh, walk, options.reapply_trainability)

    def _apply_unsharded(self, model: nn.Module, mesh_context: MeshContext) -> nn.Module:
        """Take the same walk over the mesh of one data-parallel rank."""
        return super()._apply_unsharded(model, mesh_context)


def shard_policy(
    policy: PraxisPolicy,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    moe_mesh: DeviceMesh | None = None,
    activation_checkpointing: bool | str = True,
    ignore_router_for_ac: bool = True,
    reshard_after_forward: bool | None = True,
    offload_policy: OffloadPolicy | None = None,
    forward_prefetch_depth: int = 0,
    backward_prefetch_depth: int = 0,
) -> None:
    """Make every block of the two towers and of the action expert a unit, then the root, in place.

    `parallelize_model` does this, and more for a training loop; this is for those who hold meshes
    rather than a context. Units are made by the policy's own sidecar. They cast no inputs,
    whatever `mp_policy` says: blocks cast their hidden states to its `param_dtype` themselves, as
    the policy does its inputs, and times, rotary tables and modulation come through in float32.
    Routers compute in float32, in a unit each.

    Args:
        policy: on the meta device, or with values that are the same on every rank.
        mesh: data-parallel, 1-D (sharded) or 2-D (replicated, sharded).
        mp_policy: of all units; `output_dtype` is the root's.
        moe_mesh: all ranks of `mesh` by ep and, optionally, ep_shard (and ep_replicate). With an ep
            axis of more than one rank the routed experts are spread over it, in units of their own
            over the other axes, of one rank too. None leaves experts in the units of their blocks.
        activation_checkpointing: whether blocks are recomputed in the backward; "selective" keeps
            part of them.
        ignore_router_for_ac: whether recomputes take the routes of the forward.
        reshard_after_forward: whether units are freed after their forward; None frees every block
            but the last of a stack.
        offload_policy: where shards rest; None is on the device.
        forward_prefetch_depth, backward_prefetch_depth: blocks of a stack gathered ahead; 0 leaves
            it to torch.

    Raises:
        TypeError: `policy` neither is nor holds a `PraxisPolicy`; a mesh or an option of another
            type.
        ValueError: for a policy that is sharded already, blocks with weights in common, experts
            that the ep axis cannot hold, a moe mesh over other ranks or without an ep axis; before
            anything is changed and on every rank alike.
    """
    _policy(policy, "shard_policy")
    refuse_arguments(
        mesh,
        moe_mesh,
        activation_checkpointing=activation_checkpointing,
        ignore_router_for_ac=ignore_router_for_ac,
        reshard_after_forward=reshard_after_forward,
    )
    refuse_model(policy)
    refuse_unshardable(policy)
    refuse_checkpointing(policy, activation_checkpointing)
    refuse_offload(offload_policy, mesh.device_type)
    if activation_checkpointing and not ignore_router_for_ac:
        warn_of_new_routes("ignore_router_for_ac", stacklevel=2)
    options = DenseOptions(
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        activation_checkpointing=activation_checkpointing,
        reshard_after_forward=reshard_after_forward,
        fsdp2_forward_prefetch_depth=forward_prefetch_depth,
        fsdp2_backward_prefetch_depth=backward_prefetch_depth,
    )
    walk = replace(
        PolicyWalk.of(options, _sidecar_of(policy), mesh),
        moe_mesh=moe_mesh,
        ignore_router_for_ac=ignore_router_for_ac,
    )
    walk_policy(policy, mesh, walk, None)
    finish_units(policy, walk.mp_policy)


def replicate_router_biases(policy: PraxisPolicy, mesh: DeviceMesh) -> None:
    """Make the selection bias of every router a DTensor replicated over `mesh`.

    A step of the biases then sums the loads of all its ranks. Each rank keeps its values, on the
    meta device too; a second call does nothing.

    Raises:
        TypeError: `mesh` is no DeviceMesh.
    """
    moe_ep.replicate_router_biases(policy, mesh)


def _sidecar_of(policy: nn.Module) -> ModelParallelizer:
    own = getattr(type(policy), "parallelizer", None)
    return own if isinstance(own, ModelParallelizer) else PraxisModelParallelizer()
