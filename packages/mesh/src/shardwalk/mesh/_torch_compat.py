"""Every touch of a private torch API in this package. All of it was read in torch 2.13.0."""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "add_flattened_mesh",
    "concatenate",
    "default_backend",
    "flattened_meshes",
    "group_timeout",
    "is_registered",
    "load_fake_backend",
    "mesh_without_groups",
    "new_named_group",
    "one_thread_gloo",
    "root_mesh",
]


def load_fake_backend() -> None:
    """Register the ``fake`` backend, which torch 2.13 keeps in its testing package."""
    if "FAKE" not in dist.Backend._plugins:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401


def default_backend() -> str:
    """Return the backend string that the default group was asked for.

    The public ``get_backend`` and ``get_backend_config`` (torch 2.13) change it: a composite such
    as ``cpu:gloo,cuda:nccl`` becomes one name, and ``gloo`` becomes a composite.
    """
    return str(c10d._world.pg_map[c10d._get_default_group()][0])


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return a group's timeout; torch 2.13 has only a private setter. None for a fake group."""
    backend = group._get_backend(_any_device(group))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def _any_device(group: dist.ProcessGroup) -> torch.device:
    types = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in types else sorted(types)[0])


def is_registered(group: dist.ProcessGroup) -> bool:
    """Tell whether torch (2.13) still knows a group, which ``destroy_process_group`` ends."""
    return group in c10d._world.pg_map


@contextmanager
def one_thread_gloo() -> Iterator[None]:
    """Give the gloo groups that are made meanwhile one thread each for their collectives.

    By default they have two, which both write the name of what they have done into one string,
    without a lock (``ProcessGroupGloo::runLoop`` of torch 2.13). Names above 15 characters are on
    the heap, that of the all-gather of DTensors among them, and two writers at once corrupt it: a
    rank dies in `malloc`, once in ten thousand gathers or so, more often on a busy machine.
    """
    module: Any = c10d
    if not dist.is_gloo_available() or hasattr(module.ProcessGroupGloo, "has_one_thread"):
        yield
        return
    original: Any = module.ProcessGroupGloo

    class OneThreadGloo(original):  # type: ignore[misc]
        has_one_thread = True

        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: timedelta | None = None
        ) -> None:
            options = original._Options()
            options._threads = 1
            options._devices = _gloo_devices(original)
            options._timeout = timeout or c10d.default_pg_timeout
            super().__init__(store, rank, size, options)

    module.ProcessGroupGloo = OneThreadGloo
    try:
        yield
    finally:
        module.ProcessGroupGloo = original


def _gloo_devices(gloo: Any) -> list[Any]:
    """Return the devices that torch itself would take: those of GLOO_SOCKET_IFNAME, or one."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]


def new_named_group(
    ranks: Sequence[int],
    name: str,
    backend: str,
    timeout: timedelta | None,
    description: str,
) -> dist.ProcessGroup:
    """Make a group under a name that the members agree on, in the given order of ranks.

    Only the members call it. ``new_group`` (torch 2.13) numbers groups by a count of the process,
    so that every rank must ask for every group; with ``use_local_synchronization`` it hashes how
    many groups the process holds, so that members with different histories never meet.
    """
    default = c10d._get_default_group()
    store = c10d._world.pg_map[default][1]
    bound, default.bound_device_id = default.bound_device_id, None
    group: dist.ProcessGroup
    try:
        with one_thread_gloo():
            group, _ = c10d._new_process_group_helper(
                len(ranks),
                list(ranks).index(dist.get_rank()),
                list(ranks),
                dist.Backend(backend),
                store,
                cast("c10d.GroupName", name),
                timeout=timeout or c10d._get_default_timeout(dist.Backend(backend)),
                group_desc=description,
            )
    finally:
        # A bound device would make the group a split of the default one, which all ranks must join.
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def mesh_without_groups(
    device_type: str, ranks: torch.Tensor, names: tuple[str, ...]
) -> DeviceMesh:
    """Return a mesh for a rank outside it: shape and names, no groups (torch 2.13)."""
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)
    mesh._dim_group_names = []
    return mesh


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` was sliced from, or itself (torch 2.13)."""
    return mesh._get_root_mesh()


def flattened_meshes(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """Return the flattened axes that a root mesh knows of (torch 2.13).

    ``mesh[name]`` finds them too, with a deprecation warning.
    """
    return root_mesh(mesh)._flatten_mapping


def add_flattened_mesh(
    root: DeviceMesh, axes: tuple[str, ...], name: str, group: dist.ProcessGroup
) -> DeviceMesh:
    """Register and return a 1-D view of axes of ``root`` (or of none) that uses a given group.

    ``root[axes]._flatten(name)`` (torch 2.13) would make a second group for the same ranks.
    """
    mesh = DeviceMesh(
        root.device_type,
        _layout=_flat_layout(root, axes),
        _rank_map=root._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=root,
        _init_backend=False,
    )
    mesh._dim_group_names = [group.group_name]
    root._pg_registry[group.group_name] = group
    root._flatten_mapping[name] = mesh
    return mesh


def _flat_layout(root: DeviceMesh, axes: tuple[str, ...]) -> Any:
    """Return the layout of one axis that takes in several.

    Before torch 2.12 or so a layout had ``coalesce`` instead of ``collapse`` (read, not run).
    """
    layouts = importlib.import_module("torch.distributed._mesh_layout")
    layout: Any = root[axes or root.mesh_dim_names or ()]._layout
    if hasattr(layout, "collapse"):
        flat = layout.collapse() if axes else layouts._FlatLayout(1, 0)
        return layouts._MeshLayout([flat])
    flat = layout.coalesce() if axes else layouts._MeshLayout((1,), (1,))
    return flat.nest() if len(flat) > 1 else flat


def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the axes of several meshes of the same root (torch 2.13)."""
    return DeviceMesh._concatenate(meshes)
