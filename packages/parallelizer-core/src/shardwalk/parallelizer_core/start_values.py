"""Ranks must start from the same weights: what a shard is cut from has to be one model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwalk.mesh import get_flat_mesh

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def check_equal_start(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Compare the real parameters and buffers of `model` over all data-parallel ranks.

    One exchange, of a number for each tensor. Tensors on the meta device are passed over.

    Raises:
        ValueError: on every rank, naming the first tensor that differs and the ranks that differ.
    """
    mesh = get_flat_mesh(device_mesh, "dp_cp")
    if mesh.size() == 1:
        return
    own = {name: _checksum(tensor) for name, tensor in _tensors(model) if not tensor.is_meta}
    rows: list[dict[str, int]] = [{}] * mesh.size()
    dist.all_gather_object(rows, own, group=mesh.get_group())
    names = dict.fromkeys(name for row in rows for name in row)
    for name in names:
        others = [place for place, row in enumerate(rows) if row.get(name) != rows[0].get(name)]
        if others:
            raise ValueError(
                f"{name} has other values on ranks {others} of the mesh than on rank 0: build the "
                f"model from one seed or checkpoint on every rank, or on the meta device and call "
                f"materialize after parallelize_model"
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _checksum(tensor: torch.Tensor) -> int:
    """The sum of the bit patterns: the same in whatever order and with how many threads it runs."""
    flat = tensor.detach().reshape(-1).contiguous()
    return int(flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64))
