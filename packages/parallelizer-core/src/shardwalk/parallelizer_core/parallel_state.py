"""What `parallelize_model` made of a model: its context, its units, the module inside a wrapper.

The registry holds its models weakly, so a model that goes out of scope takes its entry along, and
the model itself gains no attribute that a deep copy or a pickle would trip over.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwalk.mesh import MeshContext

_contexts: WeakKeyDictionary[nn.Module, MeshContext] = WeakKeyDictionary()


def record_mesh_context(model: nn.Module, mesh_context: MeshContext) -> None:
    """Remember that `model` was parallelized with `mesh_context`."""
    _contexts[unwrap_model(model)] = mesh_context


def mesh_context_of(model: nn.Module) -> MeshContext | None:
    """The context `model` was parallelized with, or None for a model that never was."""
    return _contexts.get(unwrap_model(model))


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's module inside a DDP wrapper; any other model is returned as it is."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def fsdp_units(model: nn.Module) -> Iterator[FSDPModule]:
    """Every FSDP2 unit of a model, children after their parents."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def current_device(device_type: str) -> torch.device:
    """The device of this rank on a mesh of that type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())
