"""Ranks must start from the same weights: what a shard is cut from has to be one model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwalk.mesh import get_flat_mesh

_T = TypeVar("_T")
Fingerprint = tuple[object, ...]

_OPTION = "option "
_CHUNK = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True)
class _Difference:
    """The first tensor that differs over an axis: on which of its ranks, from which one."""

    name: str
    others: list[int]
    first: int


def check_equal_start(
    model: nn.Module, device_mesh: DeviceMesh, options: Mapping[str, object] | None = None
) -> None:
    """Compare the parameters and buffers of `model` over all ranks of its pipeline stage.

    Data-parallel ranks keep shards or copies of one model, and tensor-parallel peers each cut their
    part from their own copy. Data-parallel ranks exchange a digest, and a few numbers for each
    tensor only where digests differ; tensor-parallel peers exchange the latter. Values on the meta
    device are none yet, and what is cut already (experts) is compared before it is cut.

    Args:
        options: what every rank must have been asked for alike, by name; compared as text.

    Raises:
        ValueError: on every rank, naming the first option or tensor that differs and the ranks that
            differ.
    """
    data, tp = get_flat_mesh(device_mesh, "dp_cp"), _tensor_parallel_axis(device_mesh)
    if data.size() == 1 and tp is None:
        return
    own: dict[str, Fingerprint] = {
        f"{_OPTION}{name}": (str(value),) for name, value in (options or {}).items()
    }
    own |= {name: fingerprint(tensor) for name, tensor in _tensors(model)}
    found = _over_data_ranks(own, data)
    where = "ranks"
    if tp is not None:
        # What a data-parallel group found goes along, so that all groups raise, and raise alike.
        reports = _exchange((found, own), tp)
        found = next((report for report, _ in reports if report is not None), None)
        if found is None:
            found = _first_difference([row for _, row in reports], list(range(len(reports))))
            where = "tp ranks"
    if found is not None and found.name.startswith(_OPTION):
        raise ValueError(
            f"{found.name.removeprefix(_OPTION)} is another one on {where} {found.others} than on "
            f"{where.removesuffix('s')} {found.first}: give every rank the same options"
        )
    if found is not None:
        raise ValueError(
            f"{found.name} has other values on {where} {found.others} than on "
            f"{where.removesuffix('s')} {found.first} (or another shape, dtype or requires_grad): "
            f"build the model from one seed or checkpoint on every rank, or on the meta device and "
            f"call materialize after parallelize_model"
        )


def _tensor_parallel_axis(device_mesh: DeviceMesh) -> DeviceMesh | None:
    has_axis = "tp" in (device_mesh.mesh_dim_names or ())
    return device_mesh["tp"] if has_axis and device_mesh["tp"].size() > 1 else None


def _over_data_ranks(own: dict[str, Fingerprint], mesh: DeviceMesh) -> _Difference | None:
    if mesh.size() == 1:
        return None
    # A thousand tables of a thousand tensors are many seconds and bytes on each of many ranks.
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    if len(set(_exchange(digest, mesh))) == 1:
        return None
    return _first_difference(_exchange(own, mesh), dist.get_process_group_ranks(mesh.get_group()))


def _exchange(own: _T, mesh: DeviceMesh) -> list[_T]:
    rows: list[Any] = [None] * mesh.size()
    dist.all_gather_object(rows, own, group=mesh.get_group())
    return rows


def _first_difference(
    rows: Sequence[dict[str, Fingerprint]], ranks: Sequence[int]
) -> _Difference | None:
    for name in dict.fromkeys(name for row in rows for name in row):
        others = [
            rank
            for rank, row in zip(ranks, rows, strict=True)
            if row.get(name) != rows[0].get(name)
        ]
        if others:
            return _Difference(name, others, ranks[0])
    return None


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not isinstance(tensor, DTensor):
            yield name, tensor


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Shape, dtype, trainability and an exact checksum of a tensor; no checksum on meta."""
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
