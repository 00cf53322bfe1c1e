"""Which ranks a mesh is made of, and the process groups that must be there for it."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from shardwalk.mesh.launch import environment_integer, initialize_one_process
from shardwalk.mesh.process_groups import group_of
from shardwalk.mesh.validation import check_integer

__all__ = ["ensure_process_group", "local_group", "mesh_members"]


def _job_size(world_size: int | None) -> int:
    """Return the number of processes: of the default group, else of the environment, else given."""
    if dist.is_initialized():
        return dist.get_world_size()
    return environment_integer("WORLD_SIZE", world_size or 1)


def mesh_members(world_size: int | None, ranks: Sequence[int] | None) -> list[int]:
    """Return the global ranks of the mesh, after checking them against the size of the job."""
    check_integer("world_size", world_size, optional=True)
    job = _job_size(world_size)
    if ranks is None:
        if world_size not in (None, job):
            raise ValueError(
                f"world_size={world_size}, but the job has {job} processes; leave world_size out, "
                "or name the ranks of a smaller mesh with ranks="
            )
        return list(range(job))
    members = _check_ranks(ranks, job)
    if world_size not in (None, job, len(members)):
        raise ValueError(
            f"world_size={world_size} is neither the number of ranks ({len(members)}) "
            f"nor that of the processes ({job})"
        )
    return members


def _check_ranks(ranks: object, job: int) -> list[int]:
    if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not ranks:
        raise TypeError(f"ranks={ranks!r} must be a non-empty list of global ranks or None")
    for rank in ranks:
        check_integer("ranks: each", rank, minimum=0, maximum=job - 1)
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"ranks={list(ranks)} names a rank twice")
    return list(ranks)


def ensure_process_group(world_size: int | None) -> None:
    """Start a job of one process where there is none; raise ValueError for a larger one."""
    if dist.is_initialized():
        return
    job = _job_size(world_size)
    if job > 1:
        raise ValueError(
            f"a mesh of {job} processes needs a process group: call initialize_distributed first "
            "(or, to plan on one CPU, torch.distributed.init_process_group with backend 'fake')"
        )
    initialize_one_process()


def local_group(members: list[int], timeout: timedelta | None) -> dist.ProcessGroup | None:
    """Return the group of a mesh that leaves ranks out; None on those, and for a full mesh."""
    if len(members) == dist.get_world_size() or dist.get_rank() not in members:
        return None
    return group_of(members, timeout, "mesh_all")
