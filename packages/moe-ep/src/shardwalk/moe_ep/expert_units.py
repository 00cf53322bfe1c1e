"""Experts as units of their own: over (ep_replicate, ep_shard), apart from their blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from shardwalk.mesh import MeshAxisName, MeshContext, get_submesh
from shardwalk.moe_ep.expert_weights import ExpertMisfitError, ExpertWeights

Door = Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class ExpertMesh:
    """The ranks that hold the experts of one pipeline stage.

    Attributes:
        ep: the axis over which experts are spread.
        shards: the mesh over which a rank's experts are sharded, and before it replicated.
        gradient_factor: what the gradients of local experts are multiplied by, since their units
            average over `shards` while a dense gradient is the mean over the data-parallel ranks.
    """

    ep: DeviceMesh
    shards: DeviceMesh
    gradient_factor: float

    @property
    def shard_size(self) -> int:
        """The number of ranks that share a rank's experts."""
        return self.shards.size(self.shards.ndim - 1)


def expert_mesh(mesh_context: MeshContext) -> ExpertMesh:
    """The expert mesh of a context that has a moe mesh."""
    assert mesh_context.moe_mesh is not None
    data_ranks = mesh_context.data_world_size * mesh_context.cp_size
    return expert_mesh_of(mesh_context.moe_mesh, data_ranks=data_ranks)


def expert_mesh_of(moe_mesh: DeviceMesh, *, data_ranks: int) -> ExpertMesh:
    """The expert mesh of a moe mesh.

    Args:
        moe_mesh: has the axis ep and, where its ranks are more, ep_shard and ep_replicate.
        data_ranks: those that a dense gradient is the mean of.
    """
    names = moe_mesh.mesh_dim_names or ()
    wanted = (MeshAxisName.EP_REPLICATE, MeshAxisName.EP_SHARD)
    others = tuple(str(name) for name in wanted if name in names)
    # A flattened axis of none of the mesh's axes is this rank alone.
    shards = get_submesh(moe_mesh, others or str(MeshAxisName.DP_SHARD_CP))
    return ExpertMesh(
        ep=get_submesh(moe_mesh, str(MeshAxisName.EP)),
        shards=shards,
        gradient_factor=shards.size() / data_ranks,
    )


def shard_dimension(shape: Sequence[int], shard_size: int) -> int | None:
    """The dimension of a local expert weight that is sharded: not 0, and as long as it divides."""
    return next((dim for dim in range(1, len(shape)) if shape[dim] % shard_size == 0), None)


def check_shards(weights: ExpertWeights, shard_size: int) -> None:
    """Refuse weights of which no dimension beside the experts' divides over the shards.

    Raises:
        ExpertMisfitError: names the parameter.
    """
    for owner, name in weights.names():
        shape = owner.get_parameter(name).shape
        if shard_size > 1 and shard_dimension(shape, shard_size) is None:
            raise ExpertMisfitError(
                f"{name} of {tuple(shape)} has no dimension but the experts' that divides by "
                f"ep_shard={shard_size}"
            )


def shard_experts(
    weights: ExpertWeights,
    mesh: ExpertMesh,
    *,
    door: Door,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None,
    reshard_after_forward: bool | None,
) -> None:
    """Make a unit of cut experts, on a mesh of one rank too.

    Their inputs are rows in the dtype in which they travelled, and are left as they are.
    """
    by_expert = {id(owner.get_parameter(name)) for owner, name in weights.names()}

    def placement(parameter: nn.Parameter) -> Shard | None:
        if id(parameter) not in by_expert:
            return None
        assert isinstance(parameter, DTensor)
        dim = shard_dimension(parameter.to_local().shape, mesh.shard_size)
        return None if dim is None else Shard(dim)

    options: dict[str, Any] = {
        "mesh": mesh.shards,
        "mp_policy": replace(mp_policy, cast_forward_inputs=False, output_dtype=None),
        "offload_policy": offload_policy or OffloadPolicy(),
        "reshard_after_forward": reshard_after_forward,
        "ignored_params": set(),
        "shard_placement_fn": placement,
    }
    door(weights.experts, **options)
