"""Megatron-FSDP on GPUs: every zero level trains to the numbers of one process.

The reference makes the step with zero gradients that the package's optimizer makes, too.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shardwalk.mesh import DistributedSetup, MegatronFSDPConfig
from shardwalk.parallelizer_core import parallelize_model, shard_optimizer
from shardwalk.parallelizer_core.testing import TinyDecoder, rank_device
from tests.gpu.worlds import BACKEND, gpu_pool, worlds

pytest.importorskip("megatron_fsdp", reason="megatron-fsdp is not installed here")
pytestmark = pytest.mark.skipif(BACKEND != "nccl", reason="megatron-fsdp runs on CUDA only")

ROWS = 8


def decoder(device: torch.device) -> TinyDecoder:
    torch.manual_seed(3)
    return TinyDecoder(dim=64, heads=4, ffn=128, vocabulary=64).to(device)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, weight_decay=0.1)


def losses(model: Any, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> list[Tensor]:
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(64, (ROWS, 17), generator=generator).to(rank_device())
        mine = rows.tensor_split(ranks)[rank]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1).float(), mine[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def compare(level: int, mode: bool) -> None:
    device, ranks = rank_device(), dist.get_world_size()
    plain = decoder(device)
    reference = adamw(plain.parameters())
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    reference.step()
    expected = losses(plain, reference, 0, 1)
    config = MegatronFSDPConfig(
        zero_dp_strategy=level, activation_checkpointing=mode, check_for_nan_in_grad=False
    )
    model = parallelize_model(decoder(device), DistributedSetup.build(config).mesh_context)
    optimizer = adamw(model.parameters())
    with pytest.raises(RuntimeError, match="call shard_optimizer"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shard_optimizer(optimizer)
    for found, wanted in zip(
        losses(model, optimizer, dist.get_rank(), ranks), expected, strict=True
    ):
        dist.all_reduce(found)
        assert (found / ranks - wanted).abs() <= 1e-5 * wanted.abs()


@pytest.mark.parametrize("mode", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("world", worlds(1, 2, 4, 8))
def test_every_zero_level_has_the_losses_of_one_process(world: int, level: int, mode: bool) -> None:
    gpu_pool(world).run(compare, level, mode)


def keys() -> tuple[list[str], list[str]]:
    model = decoder(rank_device())
    before = list(model.state_dict())
    context = DistributedSetup.build(MegatronFSDPConfig(check_for_nan_in_grad=False)).mesh_context
    return before, list(parallelize_model(model, context).state_dict())


@pytest.mark.parametrize("world", worlds(1, 2))
def test_the_state_dict_has_the_keys_of_the_model(world: int) -> None:
    for before, after in gpu_pool(world).run(keys):
        assert before == after
