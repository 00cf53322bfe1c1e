"""The ground under the GPU parity tables: one rank per GPU, and NCCL between them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwalk.parallelizer_core.testing import rank_device, rank_pool


def reduce_ranks() -> tuple[float, str]:
    value = torch.tensor(float(dist.get_rank() + 1), device=rank_device())
    dist.all_reduce(value)
    return value.item(), value.device.type


def test_the_ranks_of_all_gpus_reduce_over_nccl() -> None:
    world = torch.cuda.device_count()
    results = rank_pool(world, backend="nccl").run(reduce_ranks)
    assert results == [(world * (world + 1) / 2, "cuda")] * world
