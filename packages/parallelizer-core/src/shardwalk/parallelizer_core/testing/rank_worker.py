"""What runs in a rank of the pool."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import itertools
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwalk.mesh.launch import one_thread_gloo
from shardwalk.parallelizer_core.testing.rank_files import RankFiles
from shardwalk.parallelizer_core.testing.rank_pickle import loads_call

T = TypeVar("T")

_THOROUGH_COLLECTION = 50  # runs from one to the next

_cache: dict[Hashable, Any] = {}
_device: torch.device | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What every rank of one pool is started with; paths are folders, times are seconds."""

    world_size: int
    folder: str
    backend: str
    start_timeout: float
    collective_timeout: float
    warnings_as_errors: bool
    deterministic: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank answers: a pickled value or a traceback, and the number of its open files."""

    value: bytes = b""
    summary: str = ""
    trace: str = ""
    when: float = 0.0
    open_files: int = 0


def cached(key: Hashable, make: Callable[[], T]) -> T:
    """Return what `make` gave for this key the first time in this rank.

    Ranks live on between runs, and making process groups is slow, so that rank functions keep
    their meshes here. `make` may be collective: every rank must then ask for the same keys in the
    same order.

    Example:
        ``mesh = cached(("mesh", 2, 2), lambda: init_device_mesh("cpu", (2, 2)))``
    """
    if key not in _cache:
        _cache[key] = make()
    found: T = _cache[key]
    return found


def rank_device() -> torch.device:
    """The device of this rank: its GPU in a nccl pool, else the CPU."""
    return _device or torch.device("cpu")


def in_rank() -> bool:
    """Whether this process is a rank of a pool."""
    return _device is not None


def worker_main(rank: int, connection: Connection, options: WorkerOptions) -> None:
    """Join the process group, then answer calls until the parent goes away."""
    _redirect_output(rank, RankFiles(options.folder, options.world_size))
    with one_thread_gloo():  # the groups that tests make by torch itself, too
        _serve(rank, connection, options)


def _serve(rank: int, connection: Connection, options: WorkerOptions) -> None:
    connection.send(_guarded(lambda: _join(rank, options)))
    gc.freeze()
    for run in itertools.count(1):
        try:
            data = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # no destructors: a process group's may wait for peers that are gone
        connection.send(_guarded(lambda: _call(data, rank, options)))  # noqa: B023
        _collect_garbage(thoroughly=run % _THOROUGH_COLLECTION == 0)


def _collect_garbage(*, thoroughly: bool) -> None:
    """Free what the run left in cycles; what outlives it, modules mostly, is passed over later."""
    if thoroughly:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


def _redirect_output(rank: int, files: RankFiles) -> None:
    out = os.open(files.output_path(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    stacks = os.open(files.stacks_path(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=out)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the ranks


def _join(rank: int, options: WorkerOptions) -> None:
    global _device
    world = str(options.world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    torch.set_num_threads(1)
    _device = torch.device("cpu")
    if options.backend == "nccl":
        _device = torch.device("cuda", rank)
        torch.cuda.set_device(_device)
    _init_process_group(rank, options)


def _init_process_group(rank: int, options: WorkerOptions) -> None:
    """Start the one process group of this rank's life.

    Ranks first meet in the store, where a busy machine may take its time, so that the short
    timeout holds for the group itself.
    """
    store = dist.FileStore(os.path.join(options.folder, "store"), options.world_size)
    store.set(f"here{rank}", "1")
    everyone = [f"here{peer}" for peer in range(options.world_size)]
    store.wait(everyone, datetime.timedelta(seconds=options.start_timeout))
    timeout = datetime.timedelta(seconds=options.collective_timeout)
    # Groups made later, a mesh's axes say, take this module's default and not the first group's.
    dist.distributed_c10d.default_pg_timeout = timeout
    backend = "cpu:gloo,cuda:nccl" if options.backend == "nccl" else options.backend
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=options.world_size, timeout=timeout
    )
    dist.barrier()


def _call(data: bytes, rank: int, options: WorkerOptions) -> Any:
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(options.deterministic)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        function, args, kwargs = loads_call(data)
        if options.warnings_as_errors:
            warnings.simplefilter("error")
        return function(*args, **kwargs)


def _guarded(work: Callable[[], Any]) -> Outcome:
    """Turn whatever happens into an answer."""
    try:
        value = pickle.dumps(work(), protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(error)).strip()
        trace = traceback.format_exc()
        return Outcome(summary=summary, trace=trace, when=time.monotonic())
    return Outcome(value=value, open_files=_count_open_files())


def _count_open_files() -> int:
    return len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0
