"""Parameters that stay whole beside a unit: a hook averages their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwalk.parallelizer_core._torch_compat import sync_flags_of


def replicate_parameters(
    parameters: Iterable[nn.Parameter], *, unit: nn.Module, mesh: DeviceMesh
) -> None:
    """Keep `parameters` plain, on the mesh's device, and average their gradients over it.

    The average is taken whenever `unit` reduces its own gradients, so accumulation without sync
    works alike.
    """
    for parameter in parameters:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(_device(mesh))
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_averaging_hook(unit, mesh))


def _averaging_hook(unit: nn.Module, mesh: DeviceMesh) -> Callable[[torch.Tensor], None]:
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]

    def average(parameter: torch.Tensor) -> None:
        assert isinstance(unit, FSDPModule)
        reduces = all(reduce_grads for reduce_grads, _ in sync_flags_of(unit))
        if parameter.grad is None or not reduces:
            return
        # Averaging what was averaged before changes nothing, so the sum of the micro-batches may be
        # reduced whole.
        total = parameter.grad.float()
        for group in groups:
            dist.all_reduce(total, op=dist.ReduceOp.AVG, group=group)
        parameter.grad.copy_(total)

    return average


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
