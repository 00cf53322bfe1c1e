"""Real gloo ranks and fake worlds for the tests of this package, which needs no sibling."""

import contextlib
import multiprocessing as mp
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 18

_context = mp.get_context("forkserver")
# What a rank would import on its first FSDP step is imported once, before ranks are forked.
_context.set_forkserver_preload([
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "shardwalk.mesh",
])


def prepare() -> None:
    """Start the process that ranks are forked from, and wait until it has imported torch."""
    process = _context.Process(target=int)
    process.start()
    process.join()


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: object,
    timeout: float = 12,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` on gloo ranks; return what each returned or the error it raised.

    ``timeout`` in seconds is that of the default group. With an ``environment`` there is no group
    yet, but the variables that a launcher sets. Ranks that hang are killed and raise TimeoutError.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            place = (f"{folder}/store", rank, world_size, timeout, environment)
            job = (theirs, place, function, args)
            ranks.append(_context.Process(target=_main, args=job, daemon=True))
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return _collect(pipes, time.monotonic() + SECONDS)
        finally:
            for process in ranks:
                process.join(1)
                process.kill()


def run_ranks_cleanly(world_size: int, function: Callable[..., Any], *args: object) -> list[Any]:
    """Run ``function(*args)`` on gloo ranks and raise what went wrong on any of them here."""
    return _all_well(run_ranks(world_size, function, *args))


def run_launched(world_size: int, function: Callable[..., Any], **environment: str) -> list[Any]:
    """Run ``function()`` on ranks as a launcher starts them, and raise what went wrong here."""
    return _all_well(run_ranks(world_size, function, environment=environment))


def _all_well(results: list[Any]) -> list[Any]:
    errors = {r: e.__notes__[0] for r, e in enumerate(results) if isinstance(e, Exception)}
    if errors:
        raise AssertionError("\n".join(f"rank {rank}: {error}" for rank, error in errors.items()))
    return results


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of a world whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def real_groups() -> list[tuple[int, ...]]:
    """Return the ranks of every group of this process that has a real backend."""
    groups = dist.distributed_c10d._world.pg_map.items()
    return [
        tuple(dist.get_process_group_ranks(group))
        for group, (backend, _) in groups
        if backend != "fake"
    ]


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[Connection, Any] = {}
    while len(results) < len(pipes):
        ready = wait([p for p in pipes if p not in results], deadline - time.monotonic())
        if not ready:
            raise TimeoutError(f"ranks {[i for i, p in enumerate(pipes) if p not in results]} hang")
        for pipe in ready:
            try:
                results[pipe] = Connection.recv(pipe)
            except EOFError:
                results[pipe] = ConnectionError("the rank died")
                results[pipe].add_note("died")
    return [results[pipe] for pipe in pipes]


def _main(
    pipe: Connection,
    place: tuple[str, int, int, float, dict[str, str] | None],
    function: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    result: Any
    try:
        _start(*place)
        result = function(*args)
        if dist.is_initialized():
            # A rank that leaves while another still connects to it would be an error there.
            dist.barrier()
    except Exception as error:
        known = type(error) in {ValueError, TypeError}
        result = (
            type(error)(str(error)) if known else RuntimeError(f"{type(error).__name__}: {error}")
        )
        result.add_note(traceback.format_exc())
    pipe.send(result)
    pipe.close()
    # Groups may hold connections to ranks that are gone; nothing is left to clean up.
    os._exit(0)


def _start(
    store: str, rank: int, world_size: int, timeout: float, environment: dict[str, str] | None
) -> None:
    if environment is not None:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ.update(place, **environment)
        return
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    dist.barrier()
