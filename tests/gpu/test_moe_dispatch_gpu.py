"""Dispatchers on GPUs: sums and gradients are those of one process, and the host waits once."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
import torch.distributed as dist
from moe_dispatch_toys import block, inputs, loss_of, scales, through
from torch import Tensor

from shardwalk.moe_ep.dispatcher import AllToAllDispatcher, DeepEPDispatcher, LocalDispatcher
from shardwalk.parallelizer_core.testing import rank_device
from tests.gpu.worlds import BACKEND, gpu_pool, worlds

EXPERTS, TOP_K, HIDDEN = 16, 4, 256


def on(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    return [each.detach().to(device).requires_grad_(each.requires_grad) for each in tensors]


def compare(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """This rank's tokens through its peers, and all tokens on its CPU, in fp32."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    torch.manual_seed(0)
    batches = [
        inputs(40 * (index != 1) + index, TOP_K, EXPERTS, hidden=HIDDEN, dropped=0.1)
        for index in range(world)
    ]
    x, experts, weights = (torch.cat(each).detach() for each in zip(*batches, strict=True))
    x, scale = x.to(dtype).float(), scales(EXPERTS, HIDDEN).detach().to(dtype).float()
    for each in (x, weights, scale):
        each.requires_grad_()
    whole = through(LocalDispatcher(EXPERTS), x, experts, weights, scale)
    loss_of(whole).backward()
    group = dist.group.WORLD
    dispatcher = {
        "local": lambda: LocalDispatcher(EXPERTS),
        "all_to_all": lambda: AllToAllDispatcher(EXPERTS, group),
        "deepep": lambda: DeepEPDispatcher(EXPERTS, group),
    }[name]()
    tokens = slice(
        sum(len(each[1]) for each in batches[:rank]),
        sum(len(each[1]) for each in batches[: rank + 1]),
    )
    here = on(device, x[tokens].to(dtype), experts[tokens], weights[tokens], block(scale.to(dtype)))
    output = through(dispatcher, *here)
    loss_of(output).backward()
    expected = [whole[tokens], x.grad[tokens], weights.grad[tokens], scale.grad.chunk(world)[rank]]
    for one, other in zip(
        [output, here[0].grad, here[2].grad, here[3].grad], expected, strict=True
    ):
        assert (one.float().cpu() - other).norm() <= tolerance * other.norm()


PRECISIONS = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_one_rank(dtype: torch.dtype, tolerance: float) -> None:
    gpu_pool(1).run(compare, "local", dtype, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("world", worlds(2, 4, 8))
def test_all_to_all(world: int, dtype: torch.dtype, tolerance: float) -> None:
    gpu_pool(world).run(compare, "all_to_all", dtype, tolerance)


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="DeepEP is not installed")
@pytest.mark.parametrize("world", worlds(2, 4, 8))
def test_deepep(world: int) -> None:
    gpu_pool(world).run(compare, "deepep", torch.bfloat16, 2e-2)


def waits_of_a_step(name: str) -> int:
    device = rank_device()
    make = {
        "local": lambda: LocalDispatcher(EXPERTS),
        "all_to_all": lambda: AllToAllDispatcher(EXPERTS, dist.group.WORLD),
    }
    dispatcher = make[name]()
    x, experts, weights = on(device, *inputs(64, TOP_K, EXPERTS, hidden=HIDDEN))
    scale = scales(EXPERTS, HIDDEN).detach().to(device)
    local = block(scale) if name == "all_to_all" else scale
    for _ in range(2):  # the first one also starts kernels and communicators
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                loss_of(through(dispatcher, x, experts, weights, local)).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught)


@pytest.mark.skipif(BACKEND != "nccl", reason="counts waits for a GPU")
@pytest.mark.parametrize("name", ["local", "all_to_all"])
@pytest.mark.parametrize("world", worlds(1, 2))
def test_the_host_waits_once(world: int, name: str) -> None:
    if name == "local" and world > 1:
        pytest.skip("one rank tells")
    assert gpu_pool(world).run(waits_of_a_step, name) == [1] * world
