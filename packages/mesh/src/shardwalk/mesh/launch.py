"""Starting and ending torch.distributed for one process of a job."""

import atexit
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwalk.mesh._torch_compat import one_thread_gloo
from shardwalk.mesh.validation import check_timeout_minutes, nearest

__all__ = [
    "DistInfo",
    "initialize_distributed",
    "one_thread_gloo",
    "register_teardown",
    "shutdown_distributed",
]

_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
_teardown = ExitStack()


@dataclass(frozen=True)
class DistInfo:
    """This process's place in the job.

    ``backend`` as asked for ("gloo" or "nccl"), global ``rank``, ``world_size``, the ``device`` to
    put tensors on, and ``is_main``: whether the rank is 0.
    """

    backend: str
    rank: int
    world_size: int
    device: torch.device
    is_main: bool


def backend_string(backend: str) -> str:
    """Return what torch is asked for: NCCL always with gloo beside it, for CPU tensors.

    Raises ValueError unless "gloo", "nccl" or one of those strings.
    """
    if backend in _BACKENDS.values():
        return backend
    if backend not in _BACKENDS:
        raise ValueError(
            f"backend={backend!r} must be 'gloo' or 'nccl'{nearest(backend, _BACKENDS)}"
        )
    return _BACKENDS[backend]


def initialize_distributed(backend: str, timeout_minutes: float = 1) -> DistInfo:
    """Start torch.distributed for this process and return its place in the job.

    Ranks come from the environment that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT); without RANK and WORLD_SIZE this is a job of one process. With "nccl" the device
    is that of LOCAL_RANK and becomes the current one. ``timeout_minutes`` (fractions allowed) is
    that of the default group, and of the axis groups of meshes built without another one. The
    groups end at exit, or with ``shutdown_distributed``; signal handlers are left alone. Calling it
    again with the same backend returns the same and changes nothing.

    Raises ValueError for another backend than the running one, an incomplete environment, a device
    that is not there, or a timeout below a millisecond or above 10 million minutes.
    """
    wanted = backend_string(backend)
    name = "nccl" if "nccl" in wanted else "gloo"
    check_timeout_minutes(timeout_minutes)
    if dist.is_initialized():
        _check_running(name)
        return _info(name)
    place = _place_from_environment()
    device = _device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=timeout_minutes)
    with one_thread_gloo():
        if place is None:
            dist.init_process_group(
                wanted, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
            )
        else:
            dist.init_process_group(wanted, rank=place[0], world_size=place[1], timeout=timeout)
    _shut_down_at_exit()
    return _info(name)


def environment_integer(name: str, default: int) -> int:
    """Return an environment variable as an integer; raise ValueError when it is none."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment must be an integer") from None


def initialize_one_process() -> DistInfo:
    """Start torch.distributed for a job of one process, on the accelerator that is there."""
    return initialize_distributed("nccl" if torch.cuda.is_available() else "gloo")


def register_teardown(function: Callable[[], None]) -> None:
    """Have ``function()`` called once before the process groups end; the last registered first."""
    if not callable(function):
        raise TypeError(f"register_teardown needs a callable, not {function!r}")
    _teardown.callback(function)
    _shut_down_at_exit()


def shutdown_distributed() -> None:
    """Run the teardown callbacks and end all process groups; harmless where there are none.

    A callback that raises stops neither the others nor the end of the groups.
    """
    atexit.unregister(shutdown_distributed)
    try:
        _teardown.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _shut_down_at_exit() -> None:
    atexit.unregister(shutdown_distributed)
    atexit.register(shutdown_distributed)


def _place_from_environment() -> tuple[int, int] | None:
    """Return (rank, world size), or None for a process that no launcher started."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    rank, size = environment_integer("RANK", 0), environment_integer("WORLD_SIZE", 1)
    if {"RANK", "WORLD_SIZE"} <= {*missing}:
        return None
    if not {"RANK", "WORLD_SIZE"} & {*missing} and (rank, size) == (0, 1):
        return None
    if missing:
        raise ValueError(
            f"the environment has {', '.join(name for name in names if name not in missing)} but "
            f"not {', '.join(missing)}: start with torchrun, or set all of them, or neither RANK "
            "nor WORLD_SIZE for a single process"
        )
    if not 0 <= rank < size:
        raise ValueError(f"RANK={rank} must be from 0 to WORLD_SIZE - 1 = {size - 1}")
    return rank, size


def _device(backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("backend='nccl' needs CUDA, which is not available here; use 'gloo'")
    index = environment_integer("LOCAL_RANK", 0)
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise ValueError(
            f"LOCAL_RANK={index}, but this machine has {count} CUDA devices; "
            "start at most that many processes per machine"
        )
    return torch.device("cuda", index)


def _check_running(name: str) -> None:
    running = dist.get_backend_config()
    if name != next((known for known in ("nccl", "gloo") if known in running), None):
        raise ValueError(
            f"backend={name!r}, but torch.distributed already runs with {running!r}; "
            "call shutdown_distributed first, or ask for the running backend"
        )
    if "gloo" not in running:
        raise ValueError(
            f"torch.distributed already runs with {running!r}, which has no backend for CPU "
            "tensors; initialize it with 'cpu:gloo,cuda:nccl'"
        )


def _info(name: str) -> DistInfo:
    rank = dist.get_rank()
    return DistInfo(
        backend=name,
        rank=rank,
        world_size=dist.get_world_size(),
        device=_device(name),
        is_main=rank == 0,
    )
