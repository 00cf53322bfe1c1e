"""The pool of ranks: results, failures, deadlines, and functions that live in this module."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwalk.parallelizer_core.testing import (
    RankError,
    RankPool,
    RankTimeoutError,
    cached,
    rank_device,
    rank_pool,
    run_on_ranks,
)


@dataclass
class Pair:
    left: int
    right: torch.Tensor


def total(value: float) -> float:
    tensor = torch.tensor(value + dist.get_rank())
    dist.all_reduce(tensor)
    return tensor.item()


def swap(pair: Pair, *, add: int = 0) -> Pair:
    return Pair(left=pair.left + add + dist.get_rank(), right=-pair.right)


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("no such shard")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", file=sys.stderr)
        os.abort()
    dist.barrier()


def sleep_on(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)


def one_rank_misses_a_collective(in_subgroup: bool) -> None:
    group = dist.new_group([0, 1]) if in_subgroup else None
    if dist.get_rank() == 0:
        dist.barrier(group)


def open_many_files(count: int) -> int:
    for _ in range(count):
        os.open(os.devnull, os.O_RDONLY)
    return os.getpid()


def identity() -> tuple[int, int, int, str]:
    threads = torch.get_num_threads()
    return os.getpid(), int(os.environ["RANK"]), threads, str(rank_device())


def mesh_object() -> int:
    mesh = cached("line", lambda: init_device_mesh("cpu", (dist.get_world_size(),)))
    return id(mesh)


def warn() -> None:
    warnings.warn("careless", UserWarning, stacklevel=1)


def say(word: str) -> None:
    print(word, dist.get_rank())


def random_number() -> float:
    return torch.rand(()).item()


def modes() -> tuple[bool, torch.dtype]:
    found = torch.is_grad_enabled(), torch.get_default_dtype()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return found


def unpicklable() -> Any:
    return lambda: None


def start_ranks() -> None:
    run_on_ranks(2, total, 1.0)


def uninitialized() -> torch.Tensor:
    return torch.empty(3)


@pytest.fixture
def pair() -> Iterator[RankPool]:
    """A pool which a test may break."""
    with RankPool(2) as pool:
        yield pool


def test_results_come_in_rank_order() -> None:
    assert run_on_ranks(2, total, 1.0) == [3.0, 3.0]
    pids, ranks, threads, devices = zip(*run_on_ranks(2, identity), strict=True)
    assert len(set(pids)) == 2
    assert ranks == (0, 1)
    assert threads == (1, 1)
    assert devices == ("cpu", "cpu")


def test_classes_of_a_test_module_travel_both_ways() -> None:
    left, right = run_on_ranks(2, functools.partial(swap, add=10), Pair(1, torch.ones(2)))
    assert (left.left, right.left) == (11, 12)
    assert isinstance(right, Pair)
    assert torch.equal(right.right, -torch.ones(2))


def test_the_shared_pool_keeps_its_ranks_and_their_cache() -> None:
    pids = [answer[0] for answer in run_on_ranks(2, identity)]
    meshes = run_on_ranks(2, mesh_object)
    assert rank_pool(2) is rank_pool(2)
    assert rank_pool(2).pids == pids
    assert run_on_ranks(2, mesh_object) == meshes


def test_runs_start_from_the_same_seed() -> None:
    numbers = run_on_ranks(2, random_number) + run_on_ranks(2, random_number)
    assert len(set(numbers)) == 1


def test_runs_start_with_gradients_and_in_float32() -> None:
    """What one run switched off stays off in that run."""
    assert [run_on_ranks(2, modes) for _ in range(2)] == [[(True, torch.float32)] * 2] * 2


def test_what_ranks_print_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run_on_ranks(2, say, "hello")
    assert capsys.readouterr().out == "[rank 0] hello 0\n[rank 1] hello 1\n"


def test_a_rank_that_raises_is_named_at_once(pair: RankPool) -> None:
    before = [answer[0] for answer in pair.run(identity)]
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2: KeyError: 'no such shard'") as caught:
        pair.run(raise_on, 1)
    assert time.monotonic() - start < 5  # long before the collective's timeout
    assert caught.value.rank == 1
    assert "in raise_on" in caught.value.reports[1]
    after = [answer[0] for answer in pair.run(identity)]
    assert set(after).isdisjoint(before)


def test_a_rank_that_dies_is_named_with_its_output(pair: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 of 2: died with signal SIGABRT") as caught:
        pair.run(die_on, 1)
    assert "last words" in str(caught.value)


def test_the_deadline_shows_the_stacks_of_all_ranks(pair: RankPool) -> None:
    pair.run(identity)
    pids = pair.pids
    with pytest.raises(RankTimeoutError, match=r"ranks \[0\] of 2") as caught:
        pair.run(sleep_on, 0, 30.0, timeout=0.5)
    assert "in sleep_on" in caught.value.reports[0]
    assert "in worker_main" in caught.value.reports[1]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert pair.run(total, 1.0) == [3.0, 3.0]


@pytest.mark.parametrize("in_subgroup", [False, True])
def test_a_missed_collective_ends_within_the_short_timeout(in_subgroup: bool) -> None:
    with RankPool(2, collective_timeout=2) as pool, pytest.raises(RankError) as caught:
        pool.run(one_rank_misses_a_collective, in_subgroup)
    assert not isinstance(caught.value, RankTimeoutError)
    assert "in one_rank_misses_a_collective" in caught.value.reports[0]


def test_warnings_are_errors_in_ranks() -> None:
    with RankPool(1) as strict, pytest.raises(RankError, match="UserWarning: careless"):
        strict.run(warn)
    with RankPool(1, warnings_as_errors=False) as lenient:
        assert lenient.run(warn) == [None]


def test_a_result_that_cannot_be_pickled_names_its_rank() -> None:
    with RankPool(1) as pool, pytest.raises(RankError, match="rank 0 of 1.*pickle"):
        pool.run(unpicklable)


def test_a_pool_retires_before_files_run_out() -> None:
    with RankPool(1) as pool:
        first = pool.run(open_many_files, 300)
        assert pool.pids == []
        assert pool.run(open_many_files, 0) != first


def test_deterministic_pools_fill_new_memory() -> None:
    with RankPool(1, deterministic=True) as pool:
        assert torch.isnan(pool.run(uninitialized)[0]).all()


def test_lambdas_and_closures_are_refused() -> None:
    def closure() -> None: ...

    for function in (lambda: None, closure, functools.partial(closure)):
        with pytest.raises(TypeError, match="top level of its module"):
            run_on_ranks(2, function)
    with pytest.raises(TypeError, match="pickle"):
        run_on_ranks(2, total, lambda: None)


@pytest.mark.parametrize("world_size", [0, -1, True, "2"])
def test_world_sizes_that_make_no_sense(world_size: Any) -> None:
    with pytest.raises(ValueError, match="world_size="):
        RankPool(world_size)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend='mpi'"):
        RankPool(2, backend="mpi")


SCRIPT = """
import torch, torch.distributed as dist
from shardwalk.parallelizer_core.testing import run_on_ranks

class Box:
    def __init__(self, value): self.value = value

def work(box):
    tensor = torch.tensor(box.value)
    dist.all_reduce(tensor)
    return Box(tensor.item())

if __name__ == "__main__":
    print([box.value for box in run_on_ranks(2, work, Box(2.0))])
"""


@pytest.mark.timeout(60)  # imports torch twice
def test_functions_of_a_plain_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout == "[4.0, 4.0]\n", done.stderr


def test_a_rank_cannot_start_ranks() -> None:
    with RankPool(1) as pool, pytest.raises(RankError, match="a rank cannot run functions"):
        pool.run(start_ranks)
