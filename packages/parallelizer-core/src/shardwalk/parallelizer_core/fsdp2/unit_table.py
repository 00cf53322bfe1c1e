"""What each unit of a parallelized model holds: for tables, logs and tests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core.fsdp2.dtype_units import unheld_parameters
from shardwalk.parallelizer_core.parallel_state import unwrap_model


@dataclass(frozen=True)
class UnitInfo:
    """One unit, or the parameters that no unit holds.

    Attributes:
        name: path of the module that is the unit; "" is the root.
        parameters: number of elements of the whole parameters.
        dtypes: storage dtypes, as torch names them without the prefix.
        mesh: the mesh axes and their sizes, such as "dp_replicate 2 x dp_shard_cp 2"; "" for plain
            tensors.
        bytes_per_rank: bytes of this rank's shards.
    """

    name: str
    parameters: int
    dtypes: tuple[str, ...]
    mesh: str
    bytes_per_rank: int


def describe_units(model: nn.Module) -> list[UnitInfo]:
    """The units of `model` with the parameters each holds itself, in the order of `named_modules`.

    To be called where every unit is sharded: before a forward, after a backward. Plain parameters
    (those of a DDP model) are listed under the unit whose module they stand in.
    """
    inner = unwrap_model(model)
    seen: set[nn.Parameter] = set()
    rows = []
    for name, module in inner.named_modules():
        is_unit = isinstance(module, FSDPModule)
        if module is inner or is_unit:
            own = [p for p in unheld_parameters(module) if p not in seen]
            seen.update(own)
            if own:
                rows.append(_describe(name, own))
    return rows


def _describe(name: str, parameters: list[nn.Parameter]) -> UnitInfo:
    return UnitInfo(
        name=name,
        parameters=sum(p.numel() for p in parameters),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        mesh=next((_mesh_label(p) for p in parameters if isinstance(p, DTensor)), ""),
        bytes_per_rank=sum(_local_bytes(p) for p in parameters),
    )


def _mesh_label(parameter: DTensor) -> str:
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis {dim}" for dim in range(mesh.ndim))
    return " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))


def _local_bytes(parameter: nn.Parameter) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()
