"""Building the device mesh and the moe mesh, and the views of them that the walk uses."""

from collections.abc import Sequence
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwalk.mesh import _torch_compat
from shardwalk.mesh.axes import MeshAxisName as Axis
from shardwalk.mesh.process_groups import group_of, mesh_device_type
from shardwalk.mesh.sizes import AxisSizes

__all__ = [
    "axis_size",
    "build_device_mesh",
    "build_moe_mesh",
    "get_cp_submeshes",
    "get_flat_mesh",
    "get_fsdp_dp_mesh",
    "get_submesh",
]

# Which axes a flattened one takes in, as far as the mesh has them.
_FLATTENED: dict[str, frozenset[Axis]] = {
    Axis.DP: frozenset({Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.DP_SHARD_CP}),
    Axis.DP_SHARD_CP: frozenset({Axis.DP, Axis.DP_SHARD, Axis.CP}),
    Axis.DP_CP: frozenset({
        *(Axis.DP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.DP_SHARD_CP, Axis.CP)
    }),
}


def build_device_mesh(
    sizes: AxisSizes, ranks: Sequence[int], timeout: timedelta | None
) -> DeviceMesh:
    """Return the mesh (pp, dp_replicate, dp_shard, cp, tp) over these global ranks, tp innermost.

    Every axis group, also those of the flattened axes dp, dp_shard_cp and dp_cp, gets the timeout.
    A rank outside ``ranks`` gets the shape without groups.
    """
    axes = {
        Axis.PP: sizes.pp,
        Axis.DP_REPLICATE: sizes.dp_replicate,
        Axis.DP_SHARD: sizes.dp_shard,
        Axis.CP: sizes.cp,
        Axis.TP: sizes.tp,
    }
    mesh = _build(axes, ranks, timeout)
    if mesh.get_coordinate() is not None:
        for name in _FLATTENED:
            _flatten(mesh, name, timeout)
    return mesh


def build_moe_mesh(sizes: AxisSizes, ranks: Sequence[int], timeout: timedelta | None) -> DeviceMesh:
    """Return the mesh ([ep_replicate,] ep_shard, ep) over this rank's pipeline stage, ep innermost.

    The replicate axis is there when it has more than one rank.
    """
    axes = {Axis.EP_SHARD: sizes.ep_shard, Axis.EP: sizes.ep}
    if sizes.ep_replicate > 1:
        axes = {Axis.EP_REPLICATE: sizes.ep_replicate, **axes}
    rank = dist.get_rank()
    stage = list(ranks).index(rank) // sizes.stage_size if rank in ranks else 0
    start = stage * sizes.stage_size
    return _build(axes, ranks[start : start + sizes.stage_size], timeout)


def get_submesh(device_mesh: DeviceMesh, names: str | tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of the named axes, in this order; flattened axes count as axes.

    Raises ValueError for an axis that the mesh has not, or when two of the axes overlap.
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)
    own = device_mesh.mesh_dim_names or ()
    if wanted == own:
        return device_mesh
    parts = [
        device_mesh[name] if name in own else get_flat_mesh(device_mesh, name) for name in wanted
    ]
    if len(parts) == 1:
        return parts[0]
    try:
        return _torch_compat.concatenate(parts)
    except RuntimeError as error:
        raise ValueError(f"axes {wanted} of {device_mesh} make no mesh: {error}") from error


def get_flat_mesh(device_mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the 1-D mesh of an axis or of a flattened one: dp, dp_shard_cp or dp_cp.

    A flattened axis that the mesh does not know yet is put together from the axes that are there
    (one rank where there are none) and remembered; all its ranks must ask for it then. Raises
    ValueError for another axis that the mesh has not.
    """
    name = str(name)
    root = _torch_compat.root_mesh(device_mesh)
    for mesh in (device_mesh, root):
        if name in (mesh.mesh_dim_names or ()):
            return mesh[name]
    known = _torch_compat.flattened_meshes(root)
    if name in known:
        return known[name]
    if name in _FLATTENED and root.mesh_dim_names:
        return _flatten(root, name, None)
    axes = ", ".join((*(root.mesh_dim_names or ()), *known))
    raise ValueError(f"the mesh has no axis {name!r}: its axes are {axes}")


def get_fsdp_dp_mesh(
    device_mesh: DeviceMesh,
    dp_replicate_mesh_name: str = "dp_replicate",
    dp_shard_cp_mesh_name: str = "dp_shard_cp",
) -> DeviceMesh:
    """Return the mesh to shard over with FSDP2, fit for use beside a tp slice of ``device_mesh``.

    1-D over the shard axis, or (replicate, shard) when the replicate axis has more than one rank.
    """
    shard = get_flat_mesh(device_mesh, dp_shard_cp_mesh_name)
    if axis_size(device_mesh, dp_replicate_mesh_name, 1) == 1:
        return shard
    return _torch_compat.concatenate([get_flat_mesh(device_mesh, dp_replicate_mesh_name), shard])


def get_cp_submeshes(
    device_mesh: DeviceMesh, cp_ring_degree: int = 1, cp_ulysses_degree: int | None = None
) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the cp axis as (ring, Ulysses): neighbours share a Ulysses group.

    ``cp_ulysses_degree`` None means what the ring leaves. All ranks of the cp axis must call it.
    Raises ValueError when the degrees don't multiply to the size of the axis.
    """
    cp_mesh = get_flat_mesh(device_mesh, Axis.CP)
    shape = check_cp_degrees(cp_mesh.size(), cp_ring_degree, cp_ulysses_degree)
    ranks = cp_mesh.mesh.flatten()
    names = ("cp_ring", "cp_ulysses")
    timeout = _torch_compat.group_timeout(cp_mesh.get_group()) if cp_mesh.size() > 1 else None
    view = _mesh_of(ranks.view(shape), names, timeout, [cp_mesh.get_group()])
    return view["cp_ring"], view["cp_ulysses"]


def check_cp_degrees(cp_size: int, ring: int, ulysses: int | None) -> tuple[int, int]:
    """Return (ring, Ulysses) degrees; raise ValueError when their product is not ``cp_size``."""
    other = cp_size // ring if ulysses is None else ulysses
    if ring * other != cp_size:
        raise ValueError(
            f"cp_size {cp_size} = cp_ring_degree {ring} x cp_ulysses_degree "
            f"{'?' if ulysses is None else ulysses} does not hold"
        )
    return ring, other


def axis_size(mesh: DeviceMesh | None, name: str, default: int) -> int:
    """Return the size of an axis, or ``default`` where there is no such axis or no mesh."""
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    return mesh.size(names.index(name)) if mesh is not None and name in names else default


def _build(axes: dict[Axis, int], ranks: Sequence[int], timeout: timedelta | None) -> DeviceMesh:
    assert prod(axes.values()) == len(ranks)
    tensor = torch.tensor(ranks, dtype=torch.int, device="cpu").view(*axes.values())
    names = tuple(str(name) for name in axes)
    if dist.get_rank() not in ranks:
        return _torch_compat.mesh_without_groups(mesh_device_type(), tensor, names)
    return _mesh_of(tensor, names, timeout, [])


def _mesh_of(
    ranks: torch.Tensor,
    names: tuple[str, ...],
    timeout: timedelta | None,
    known: list[dist.ProcessGroup],
) -> DeviceMesh:
    """Return a mesh whose axis groups come from ``group_of``; this rank must be in ``ranks``."""
    place = (ranks == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for dim, name in enumerate(names):
        index: list[int | slice] = list(place)
        index[dim] = slice(None)
        groups.append(group_of(ranks[tuple(index)].tolist(), timeout, f"mesh_{name}", known))
    return DeviceMesh.from_group(groups, mesh_device_type(), ranks, mesh_dim_names=names)


def _flatten(root: DeviceMesh, name: str, timeout: timedelta | None) -> DeviceMesh:
    axes = tuple(axis for axis in root.mesh_dim_names or () if axis in _FLATTENED[name])
    ranks = root[axes].mesh.flatten().tolist() if axes else [dist.get_rank()]
    group = group_of(ranks, timeout, f"mesh_{name}", [root.get_group(axis) for axis in axes])
    return _torch_compat.add_flattened_mesh(root, axes, str(name), group)
