"""Ranks must start from the same weights: what a shard is cut from has to be one model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwalk.mesh import get_flat_mesh

Fingerprint = tuple[tuple[int, ...], str, bool, int | None]

_CHUNK = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def check_equal_start(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Compare the parameters and buffers of `model` over all data-parallel ranks.

    One exchange, of a few numbers for each tensor. Values on the meta device are none yet.

    Raises:
        ValueError: on every rank, naming the first tensor that differs and the ranks that differ.
    """
    mesh = get_flat_mesh(device_mesh, "dp_cp")
    if mesh.size() == 1:
        return
    own = {name: _fingerprint(tensor) for name, tensor in _tensors(model)}
    rows: list[dict[str, Fingerprint]] = [{}] * mesh.size()
    dist.all_gather_object(rows, own, group=mesh.get_group())
    names = dict.fromkeys(name for row in rows for name in row)
    for name in names:
        others = [place for place, row in enumerate(rows) if row.get(name) != rows[0].get(name)]
        if others:
            raise ValueError(
                f"{name} has other values on ranks {others} of the mesh than on rank 0 (or another "
                f"shape, dtype or requires_grad): build the model from one seed or checkpoint on "
                f"every rank, or on the meta device and call materialize after parallelize_model"
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _fingerprint(tensor: torch.Tensor) -> Fingerprint:
    checksum = None if tensor.is_meta else _checksum(tensor)
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad, checksum


def _checksum(tensor: torch.Tensor) -> int:
    """The bit patterns, each times its place: exact integers, in whatever order they are added."""
    flat = tensor.detach().reshape(-1).contiguous()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].view(_BITS[flat.element_size()]).to(torch.int64)
        odd = torch.arange(2 * start + 1, 2 * (start + bits.numel()), 2, device=flat.device)
        total += (bits * odd).sum()
    return int(total)
