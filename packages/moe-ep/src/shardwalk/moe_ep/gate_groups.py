"""Over which ranks a gate sums what it counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwalk.mesh import MeshContext, get_flat_mesh


@dataclass(frozen=True, kw_only=True)
class GateGroups:
    """The process groups of one gate.

    Attributes:
        data_ranks: dp x cp, the ranks whose gradients are averaged.
        sequence: groups whose ranks hold parts of the same sequences.
        stage: groups that together hold every token of the pipeline stage, each once.
    """

    data_ranks: int = 1
    sequence: tuple[dist.ProcessGroup, ...] = ()
    stage: tuple[dist.ProcessGroup, ...] = ()

    @classmethod
    def of(cls, mesh_context: MeshContext, *, tokens_split_over_tp: bool) -> GateGroups:
        """Those of a mesh; none are made for axes of one rank."""
        mesh = mesh_context.device_mesh
        if mesh is None:
            return cls()
        splits_tp = tokens_split_over_tp and mesh_context.tp_size > 1
        data = get_flat_mesh(mesh, "dp_cp")
        over_data = (data.get_group(),) if data.size() > 1 else ()
        over_cp = (mesh["cp"].get_group(),) if mesh_context.cp_size > 1 else ()
        over_tp = (mesh["tp"].get_group(),) if splits_tp else ()
        stage = (*over_data, *over_tp)
        if len(stage) > 1 and mesh_context.pp_size == 1:
            stage = (_group_of_the_mesh(mesh_context),)  # one collective instead of two
        return cls(data_ranks=data.size(), sequence=(*over_cp, *over_tp), stage=stage)

    @classmethod
    def of_data_mesh(cls, mesh: DeviceMesh) -> GateGroups:
        """Those of a mesh of data-parallel ranks, none of which share a sequence."""
        over_mesh = (mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1)
        return cls(data_ranks=mesh.size(), stage=tuple(over_mesh))


def sum_over(groups: tuple[dist.ProcessGroup, ...], counts: Tensor) -> Tensor:
    """`counts`, summed in place over the ranks of all groups; one all-reduce for each."""
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts


def _group_of_the_mesh(mesh_context: MeshContext) -> dist.ProcessGroup:
    group = mesh_context.process_group or dist.group.WORLD
    assert group is not None, "a mesh has a process group"
    return group
