"""What `parallelize_model` made of a model: its context, its units, the module inside a wrapper.

The registry holds its models weakly, so a model that goes out of scope takes its entry along, and
the model itself gains no attribute that a deep copy or a pickle would trip over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwalk.mesh import MeshContext

_PREFIX = "module."

_contexts: WeakKeyDictionary[nn.Module, MeshContext] = WeakKeyDictionary()


def record_mesh_context(model: nn.Module, mesh_context: MeshContext) -> None:
    """Remember that `model` was parallelized with `mesh_context`."""
    _contexts[unwrap_model(model)] = mesh_context


def mesh_context_of(model: nn.Module) -> MeshContext | None:
    """The context `model` was parallelized with, or None for a model that never was."""
    return _contexts.get(unwrap_model(model))


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's module inside the wrapper of DDP or Megatron-FSDP; another model as it is."""
    wraps = isinstance(model, DistributedDataParallel | megatron_fsdp_wrapper())
    return model.get_submodule("module") if wraps else model


def megatron_fsdp_wrapper() -> type[nn.Module]:
    """The class of Megatron-FSDP's wrapper; that of DDP's while the package is not in use."""
    package = sys.modules.get("megatron_fsdp")
    return getattr(package, "MegatronFSDP", DistributedDataParallel)


def keep_original_keys(wrapper: nn.Module) -> None:
    """Let a wrapper around `module` save and load under the names of what it wraps."""
    wrapper.register_state_dict_post_hook(_strip_prefix)
    wrapper.register_load_state_dict_pre_hook(_add_prefix)


def class_of(module: nn.Module) -> type:
    """The class of a module as its author wrote it: a unit of FSDP2 has a class of its own."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


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


def _strip_prefix(
    wrapped: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    start = prefix + _PREFIX
    for key in [key for key in state if key.startswith(start)]:
        state[prefix + key.removeprefix(start)] = state.pop(key)


def _add_prefix(wrapped: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + _PREFIX + key.removeprefix(prefix)] = state.pop(key)
