"""A pool of ranks: processes that share one process group for life and run functions together."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import pickle
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from shardwalk.parallelizer_core.testing.rank_files import RankFiles
from shardwalk.parallelizer_core.testing.rank_pickle import dumps_call
from shardwalk.parallelizer_core.testing.rank_reports import (
    describe_exit,
    failure,
    timeout_error,
)
from shardwalk.parallelizer_core.testing.rank_worker import (
    Outcome,
    WorkerOptions,
    in_rank,
    worker_main,
)

_GRACE = 0.3  # seconds that peers get to report too once one rank has failed
_OPEN_FILES_LIMIT = 256  # process groups cannot be closed safely; a pool that piled up retires
_PRELOAD = ["shardwalk.parallelizer_core.testing._preload"]

_pools: dict[tuple[int, str], RankPool] = {}
_started = False
_main_lock = threading.Lock()  # pools of several threads may start at once


@dataclass(frozen=True, kw_only=True)
class _Rank:
    index: int
    process: BaseProcess
    connection: Connection


class RankPool:
    """Runs functions on `world_size` processes that form one process group.

    Ranks start at the first `run` and live until `close`; after any failure they are killed and the
    next `run` starts new ones. In each run torch's seed is 0, one thread is used and warnings are
    errors. What ranks print is printed here after the run.

    Args:
        world_size: number of ranks; on ``nccl`` at most the number of visible GPUs.
        timeout: seconds that a run may take before the stacks of all ranks are dumped and raised.
        collective_timeout: seconds a collective waits for its peers, in every group.
        start_timeout: seconds the ranks have to find each other.
        backend: ``gloo`` or ``nccl`` (gloo for CPU tensors beside it, one GPU per rank).
        warnings_as_errors: whether a warning in a rank raises.
        deterministic: run with torch's deterministic algorithms, which also fill new memory with
            NaN, so that a read of uninitialized memory shows.

    Raises:
        ValueError: on a world size below 1 or another backend.

    Example:
        ::

            def total(value: float) -> float:        # at the top level of a module
                tensor = torch.tensor(value + dist.get_rank())
                dist.all_reduce(tensor)
                return tensor.item()

            def test_total() -> None:
                assert run_on_ranks(4, total, 1.0) == [10.0] * 4

        Tests that break a process group on purpose take a pool of their own:
        ``with RankPool(2, collective_timeout=2) as pool: ...``
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = 60.0,
        collective_timeout: float = 20.0,
        start_timeout: float = 120.0,
        backend: str = "gloo",
        warnings_as_errors: bool = True,
        deterministic: bool = False,
    ) -> None:
        _check(world_size, backend)
        self.world_size = world_size
        self.timeout = timeout
        self._start_timeout = start_timeout
        self._lock = threading.Lock()
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._options: dict[str, Any] = {
            "world_size": world_size,
            "backend": backend,
            "start_timeout": start_timeout,
            "collective_timeout": collective_timeout,
            "warnings_as_errors": warnings_as_errors,
            "deterministic": deterministic,
        }

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank and return the results in rank order.

        The function is found by its module and name, so it must stand at the top level of a file
        (the test module that uses it will do); arguments and results are pickled, tensors included,
        DTensors not.

        Raises:
            TypeError: a lambda, a closure or something that cannot be pickled.
            RuntimeError: called in a rank.
            RankError: a rank raised or died; at once, with its traceback.
            RankTimeoutError: the deadline passed; with the stacks of all ranks.
        """
        if in_rank():
            raise RuntimeError(
                "a rank cannot run functions on ranks; in a script, do so under "
                '`if __name__ == "__main__":` only, since ranks import the script'
            )
        data = dumps_call(function, args, kwargs)
        with self._lock:
            try:
                self._start()
                self._files().clear_output()
                for rank in self._ranks:
                    with contextlib.suppress(OSError):  # a dead rank is reported by _collect
                        rank.connection.send_bytes(data)
                outcomes = self._collect(self.timeout if timeout is None else timeout)
                results = [pickle.loads(outcome.value) for outcome in outcomes]
                self._files().print_output()
            except BaseException:
                self._kill()
                raise
            if max(outcome.open_files for outcome in outcomes) > _OPEN_FILES_LIMIT:
                self._kill()
            return results

    @property
    def pids(self) -> list[int]:
        """The process ids of the living ranks, empty before the first run."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def close(self) -> None:
        """End the ranks; a later `run` starts new ones."""
        with self._lock:
            self._kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self) -> None:
        global _started
        if self._ranks:
            return
        _started = True
        self._folder = tempfile.TemporaryDirectory(prefix="shardwalk-ranks-")
        options = WorkerOptions(folder=self._folder.name, **self._options)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        with _hidden_main():
            for index in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=worker_main, args=(index, theirs, options), daemon=True
                )
                process.start()
                theirs.close()
                self._ranks.append(_Rank(index=index, process=process, connection=ours))
        self._collect(self._start_timeout)

    def _collect(self, timeout: float) -> list[Outcome]:
        """Wait for every rank's answer; raise for the first failure or at the deadline."""
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        failed = False
        while len(outcomes) < self.world_size:
            pending = [rank for rank in self._ranks if rank.index not in outcomes]
            handles = [h for r in pending for h in (r.connection, r.process.sentinel)]
            ready = wait(handles, max(0.0, deadline - time.monotonic()))
            for rank in pending:
                if rank.connection in ready or rank.process.sentinel in ready:
                    outcomes[rank.index] = self._receive(rank)
            if not failed and any(outcome.summary for outcome in outcomes.values()):
                failed, deadline = True, time.monotonic() + _GRACE
            if not ready:
                break
        files = self._files()
        if failed:
            raise failure(outcomes, files)
        if len(outcomes) < self.world_size:
            raise timeout_error(timeout, outcomes, self.pids, files)
        return [outcomes[index] for index in range(self.world_size)]

    def _receive(self, rank: _Rank) -> Outcome:
        try:
            if rank.connection.poll():
                outcome: Outcome = rank.connection.recv()
                return outcome
        except (EOFError, OSError):
            pass
        rank.process.join(1.0)
        summary = f"died with {describe_exit(rank.process.exitcode)}"
        output = self._files().output(rank.index)
        return Outcome(summary=summary, trace=f"its last output:\n{output}")

    def _files(self) -> RankFiles:
        assert self._folder is not None
        return RankFiles(self._folder.name, self.world_size)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.connection.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def rank_pool(world_size: int, *, backend: str = "gloo") -> RankPool:
    """The pool of that many ranks which this process shares; closed when it exits."""
    pool = _pools.get((world_size, backend))
    if pool is None:
        pool = _pools[world_size, backend] = RankPool(world_size, backend=backend)
        atexit.register(pool.close)
    return pool


def run_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[Any]:
    """`RankPool.run` on the shared pool of that many ranks."""
    return rank_pool(world_size).run(function, *args, **kwargs)


def preload(*modules: str) -> None:
    """Have ranks start with these modules imported; heavy ones, named before the first pool starts.

    Raises:
        RuntimeError: ranks were started already.
    """
    if _started:
        raise RuntimeError(f"preload{modules} comes too late: ranks were started already")
    _PRELOAD.extend(name for name in modules if name not in _PRELOAD)


def _check(world_size: int, backend: str) -> None:
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size={world_size!r} is not allowed; use an integer of 1 or more")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend={backend!r} is not allowed; use 'gloo' or 'nccl'")


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing the main script into ranks that don't ask for it."""
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
