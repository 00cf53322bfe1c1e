"""Starting and ending a job: environments, backends, devices, teardown, signals, imports."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from mesh_ranks import run_launched

from shardwalk.mesh import (
    DistributedSetup,
    get_flat_mesh,
    initialize_distributed,
    register_teardown,
    shutdown_distributed,
)
from shardwalk.mesh.launch import backend_string

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(code: str) -> str:
    """Return what a process of its own prints; it must warn of nothing and exit cleanly."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={name: value for name, value in os.environ.items() if name not in PLACE},
        capture_output=True,
        text=True,
        timeout=18,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


SINGLE = """
    import signal, warnings
    import torch, torch.distributed as dist
    from shardwalk.mesh import *

    def mine(*args): pass
    signal.signal(signal.SIGINT, mine)
    info = initialize_distributed("gloo", timeout_minutes=0.25)
    assert info == DistInfo("gloo", 0, 1, torch.device("cpu"), True), info
    assert initialize_distributed("gloo") == info
    assert dist.group.WORLD._get_backend(info.device).options._timeout.total_seconds() == 15
    for bad, error in [("nccl", ValueError), ("glo", ValueError), (None, ValueError)]:
        try:
            initialize_distributed(bad)
        except error as raised:
            print(raised)
        else:
            raise AssertionError(bad)
    register_teardown(lambda: print("first registered", dist.is_initialized()))
    register_teardown(lambda: print("last registered", dist.is_initialized()))
    try:
        register_teardown(3)
    except TypeError as error:
        print(error)
    shutdown_distributed()
    shutdown_distributed()
    print("ended", dist.is_initialized())
    context = MeshContext.build(DDPConfig())
    assert context.dp_size == dist.get_world_size() == 1
    assert context.device_mesh.device_type == "cpu"
    assert len(dist.distributed_c10d._world.pg_map) == 1
    register_teardown(lambda: print("at exit", dist.is_initialized()))
    assert signal.getsignal(signal.SIGINT) is mine
"""


def test_one_process_without_any_environment() -> None:
    """P32: a device on the CPU too, signal handlers left alone; teardown before the groups end."""
    lines = run(SINGLE).splitlines()
    assert "already runs with" in lines[0]
    assert "did you mean 'gloo'" in lines[1]
    assert "backend=None" in lines[2]
    assert lines[3:] == [
        "register_teardown needs a callable, not 3",
        "last registered True",
        "first registered True",
        "ended False",
        "at exit True",
    ]


def launched() -> tuple[object, ...]:
    info = initialize_distributed("gloo", timeout_minutes=0.2)
    context = DistributedSetup.build("ddp").mesh_context
    assert context.device_mesh is not None
    value = torch.tensor(info.rank + 1)
    dist.all_reduce(value, group=get_flat_mesh(context.device_mesh, "dp").get_group())
    calls = []
    register_teardown(lambda: calls.append(dist.is_initialized()))
    register_teardown(lambda: calls.append(calls[0]))
    with pytest.raises(IndexError):
        shutdown_distributed()
    assert calls == [True]
    assert not dist.is_initialized()
    return info.rank, info.world_size, info.is_main, int(value), context.data_rank


def test_ranks_of_a_launcher_meet_and_end_cleanly() -> None:
    """A teardown that fails stops neither the others nor the end of the groups."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    assert run_launched(2, launched, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) == [
        (0, 2, True, 3, 0),
        (1, 2, False, 3, 1),
    ]


ENVIRONMENTS = [
    ({"RANK": "0"}, "not WORLD_SIZE"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "not MASTER_ADDR, MASTER_PORT"),
    ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
    (
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        "RANK=2 must be from 0 to WORLD_SIZE - 1 = 1",
    ),
]


@pytest.mark.parametrize(("environment", "words"), ENVIRONMENTS)
def test_incomplete_environments_are_explained(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        with pytest.raises(ValueError) as error:
            initialize_distributed("gloo")
    finally:
        shutdown_distributed()
    assert words in str(error.value)


@pytest.mark.parametrize("value", [0, -1, 1e-5, 1e8, float("inf"), float("nan")])
def test_timeouts_that_no_clock_counts_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"timeout_minutes={value}"):
        initialize_distributed("gloo", timeout_minutes=value)
    assert not dist.is_initialized()


def test_nccl_always_has_gloo_beside_it() -> None:
    """B55: offloaded gradients and CPU tensors need a CPU backend."""
    assert backend_string("nccl") == backend_string("cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:nccl"
    assert backend_string("gloo") == "gloo"


IMPORTS = """
    import os, sys
    import torch
    before = os.times().user
    import shardwalk.mesh
    print(os.times().user - before)
    assert "torch.distributed.fsdp" not in sys.modules
    assert "torch.distributed.tensor" not in sys.modules
    shardwalk.mesh.DDPConfig(), shardwalk.mesh.MoEParallelizerConfig(), shardwalk.mesh.MeshContext()
    assert "torch.distributed.fsdp" not in sys.modules
"""


def test_importing_costs_little_and_leaves_fsdp_alone() -> None:
    assert float(run(IMPORTS)) < 0.1
