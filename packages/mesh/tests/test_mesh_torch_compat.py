"""Each private torch API still works as the code expects, and is still needed."""

import inspect
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from mesh_ranks import fake_world
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwalk.mesh import FSDP2Config, MeshContext, ParallelismSizes, _torch_compat
from shardwalk.mesh.process_groups import group_of


def test_flattened_axes_still_cannot_be_sliced_without_a_warning() -> None:
    with fake_world(4):
        mesh = MeshContext.build(FSDP2Config(), ParallelismSizes(cp_size=2)).device_mesh
        assert mesh is not None
        assert set(_torch_compat.flattened_meshes(mesh)) == {"dp", "dp_shard_cp", "dp_cp"}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _ = mesh["dp_shard_cp"]
        assert caught, "torch slices flattened axes in silence: get_flat_mesh may do so too"
        assert mesh.get_group("dp_shard_cp") is dist.group.WORLD


def test_torch_still_makes_groups_that_are_not_needed() -> None:
    with fake_world(4):
        init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
        assert len(c10d._world.pg_map) > 1, "torch makes no group for an axis of one rank now"
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        before = len(c10d._world.pg_map)
        mesh["dp_shard"]._flatten("dp")
        assert len(c10d._world.pg_map) > before, "torch reuses the group of a flattened axis now"
        assert "sort_ranks" not in inspect.signature(DeviceMesh.__init__).parameters


def test_new_group_still_needs_every_rank_or_equal_histories() -> None:
    source = inspect.getsource(c10d._hash_ranks_to_str)
    assert "_world.pg_names" in source, "hashed names may no longer depend on other groups"
    assert "group_name" not in inspect.signature(dist.new_group).parameters


def test_a_timeout_has_no_public_getter_yet() -> None:
    assert not hasattr(dist, "get_pg_timeout")
    with fake_world(2):
        assert dist.group.WORLD is not None
        assert _torch_compat.group_timeout(dist.group.WORLD) is None


def test_the_backend_that_was_asked_for() -> None:
    with fake_world(2):
        assert _torch_compat.default_backend() == "fake"
        assert dist.get_backend_config() != "fake"


def test_a_mesh_for_a_rank_outside() -> None:
    with fake_world(4, 3):
        mesh = _torch_compat.mesh_without_groups("cpu", torch.arange(2).view(1, 2), ("pp", "tp"))
        assert mesh.get_coordinate() is None
        assert tuple(mesh.shape) == (1, 2)
        assert _torch_compat.root_mesh(mesh) is mesh


def test_concatenated_meshes_have_one_root() -> None:
    with fake_world(4):
        mesh = MeshContext.build(FSDP2Config(), ParallelismSizes(tp_size=2)).device_mesh
        assert mesh is not None
        both = _torch_compat.concatenate([mesh["dp_shard"], mesh["tp"]])
        assert _torch_compat.root_mesh(both) is mesh
        assert both == mesh["dp_shard", "tp"]


def test_groups_are_made_anew_after_they_were_destroyed() -> None:
    with fake_world(4, 1):
        first = group_of([1, 3], None, "mesh_tp")
        assert group_of([1, 3], None, "mesh_dp") is first
        assert dist.get_process_group_ranks(group_of([3, 1], None, "mesh_tp")) == [3, 1]
        dist.destroy_process_group(first)
        assert not _torch_compat.is_registered(first)
        second = group_of([1, 3], None, "mesh_tp")
        assert second is not first
        assert second.group_name != first.group_name
        alone = group_of([1], None, "mesh_pp")
        assert dist.get_backend(alone) == "fake"


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "all_to_all"])
def test_collectives_of_one_rank_copy(operation: str) -> None:
    """A rank alone has a fake group, whose results must be those of a real one."""
    with fake_world(2):
        group = group_of([0], None, "mesh_pp")
        given, found = torch.arange(4.0), torch.full((4,), -1.0)
        if operation == "reduce_scatter":
            dist.reduce_scatter_single(found, given, group=group)
        elif operation == "all_gather":
            dist.all_gather_single(found, given, group=group)
        else:
            dist.all_to_all_single(found, given, group=group)
        assert torch.equal(found, given)
        dist.all_reduce(found, group=group)
        assert torch.equal(found, given)


THREADS = """
import os
import torch.distributed as dist
from shardwalk.mesh import initialize_distributed
from shardwalk.mesh.launch import one_thread_gloo

def threads():
    dist.barrier()  # a thread has its name once it has worked
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return sum(name.startswith("pt_gloo_runloop") for name in names)

with one_thread_gloo():
    initialize_distributed("gloo")
print(threads())
group = dist.new_group([0])  # torch's own, for comparison
dist.barrier(group)
print(threads(), flush=True)
"""

# What the threads of one group do to each other; without the second it goes on for ever.
RACE = """
import datetime, resource, sys, time
import torch
import torch.distributed as dist

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=60))
given, found = [torch.ones(1)], [[torch.ones(1)]]
end = time.monotonic() + 20
while time.monotonic() < end:
    for work in [group.allgather_coalesced(found, given) for _ in range(100)]:
        work.wait()
"""


def run_alone(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_a_gloo_group_has_one_thread() -> None:
    result = run_alone(THREADS)
    assert result.stdout.split() == ["1", "3"], result.stderr


def test_two_threads_of_a_gloo_group_still_race() -> None:
    if run_alone(RACE).returncode == 0:
        assert torch.__version__ < "2.14", (
            "torch locks what both threads write: drop one_thread_gloo"
        )
        pytest.skip("the race took no effect within 20 seconds")
