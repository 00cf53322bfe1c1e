"""What importing a package costs beyond the torch that it needs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Module, what is imported before the clock starts, user CPU seconds allowed.
BUDGETS = [
    ("shardwalk.mesh", "torch", 0.1),
    (
        "shardwalk.parallelizer_core",
        "torch.distributed.fsdp, torch.distributed.tensor.parallel",
        0.2,
    ),
    ("shardwalk.moe_ep", "shardwalk.parallelizer_core", 0.1),
]

# torch is imported once; each sample is a fork of that process which imports the package.
SCRIPT = """
import importlib, os, sys
import {before}
for _ in range(10):
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        start = os.times().user
        importlib.import_module({module!r})
        os.write(write, str(os.times().user - start).encode())
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit("the import failed")
    print(os.read(read, 100).decode())
"""


@pytest.mark.parametrize(("module", "before", "seconds"), BUDGETS)
def test_import_is_cheap(module: str, before: str, seconds: float) -> None:
    script = SCRIPT.format(before=before, module=module)
    # As installed, where modules are compiled: the first sample may do that for the others.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env
    )
    # The cheapest of the samples: a busy machine makes the others cost more than they do.
    assert min(map(float, result.stdout.split())) <= seconds


def test_mesh_leaves_the_fsdp_of_torch_alone_until_a_policy_is_made() -> None:
    script = """
import sys
import shardwalk.mesh
before = "torch.distributed.fsdp" in sys.modules
shardwalk.mesh.FSDP2Config()
print(before, "torch.distributed.fsdp" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "True"]
