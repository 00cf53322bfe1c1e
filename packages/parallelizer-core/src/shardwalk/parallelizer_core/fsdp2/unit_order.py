"""A debug mode that finds a unit which not every rank runs, before its collective stalls.

Every unit's gather needs all ranks of its mesh. A tower that one rank skips (a batch without an
image) pairs that rank's next gather with another unit's: gloo ends the process, NCCL waits until
its timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwalk.mesh import get_fsdp_dp_mesh
from shardwalk.parallelizer_core.base_models import base_model_of
from shardwalk.parallelizer_core.parallel_state import mesh_context_of

_END = "the end of the forward"


@contextmanager
def check_unit_order(model: nn.Module) -> Iterator[None]:
    """Compare in every forward of `model` which unit each rank is about to run.

    Slow (a small exchange before every unit): for finding the fault, not for training.

    Raises:
        ValueError: `model` has no FSDP2 units.
        RuntimeError: from the forward, on every rank, naming what each rank was about to run.
    """
    if not _is_unit(model):
        model = base_model_of(model)
    mesh_context = mesh_context_of(model)
    if not _is_unit(model) or mesh_context is None:
        raise ValueError(
            "check_unit_order needs a model that parallelize_model sharded with strategy='fsdp2'"
        )
    assert mesh_context.device_mesh is not None
    mesh = get_fsdp_dp_mesh(mesh_context.device_mesh)
    handles = [
        module.register_forward_pre_hook(_checkpoint(name or "the root", mesh), prepend=True)
        for name, module in model.named_modules()
        if _is_unit(module)
    ]
    handles.append(model.register_forward_hook(_checkpoint(_END, mesh)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _checkpoint(name: str, mesh: DeviceMesh) -> Callable[..., None]:
    def compare(*unused: Any) -> None:
        names = _gather(name, mesh)
        if len(set(names.values())) > 1:
            listed = "; ".join(f"rank {rank}: {unit}" for rank, unit in sorted(names.items()))
            raise RuntimeError(
                f"the ranks are about to run different units ({listed}); let every rank run them "
                f"all, with an empty batch where it has no input for one"
            )

    return compare


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _gather(name: str, mesh: DeviceMesh) -> dict[int, str]:
    """Exchange the names over one mesh axis after the other: every rank sees all of them."""
    names = {dist.get_rank(): name}
    for dim in range(mesh.ndim):
        gathered: list[dict[int, str]] = [{}] * mesh.size(dim)
        dist.all_gather_object(gathered, names, group=mesh.get_group(dim))
        names = {rank: unit for part in gathered for rank, unit in part.items()}
    return names
