"""The ground under the GPU parity tables: one rank per GPU, and NCCL between them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwalk.parallelizer_core.testing import rank_device
from tests.gpu.worlds import BACKEND, gpu_pool, worlds


def reduce_ranks() -> tuple[float, float, str]:
    on_device = torch.tensor(float(dist.get_rank() + 1), device=rank_device())
    dist.all_reduce(on_device)
    on_cpu = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(on_cpu)
    return on_device.item(), on_cpu.item(), on_device.device.type


@pytest.mark.parametrize("world", worlds(1, 2, 4, 8))
def test_ranks_reduce_on_their_gpus_and_beside_them(world: int) -> None:
    total = world * (world + 1) / 2
    device = "cuda" if BACKEND == "nccl" else "cpu"
    assert gpu_pool(world).run(reduce_ranks) == [(total, total, device)] * world
