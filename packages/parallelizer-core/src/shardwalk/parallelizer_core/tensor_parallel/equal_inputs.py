"""Ranks of one tensor-parallel group must read the same rows."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core.fsdp2.nested import tensors_in
from shardwalk.parallelizer_core.start_values import fingerprint


def check_first_inputs(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compare what the first call of `model` is given over the tensor-parallel ranks.

    One exchange, of a few numbers for each tensor, once. Ranks with other rows would mix the parts
    of two batches into one wrong loss, and with other lengths abort in a collective.
    """

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        own = [
            fingerprint(tensor.detach())
            for tensor in tensors_in([*args, *kwargs.values()])
            if not isinstance(tensor, DTensor)
        ]
        rows: list[Any] = [None] * mesh.size()
        dist.all_gather_object(rows, own, group=mesh.get_group())
        others = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if others:
            raise ValueError(
                f"tp ranks {others} called the model with other inputs than tp rank 0: give all "
                f"ranks of a tensor-parallel group the same rows (choose them by "
                f"mesh_context.data_rank and data_world_size, not by the global rank)"
            )

    handle = model.register_forward_pre_hook(check, with_kwargs=True)
