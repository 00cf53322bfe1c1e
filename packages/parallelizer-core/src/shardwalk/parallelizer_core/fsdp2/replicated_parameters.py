"""Parameters that stay whole beside a unit: replicated, with gradients averaged by a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from shardwalk.parallelizer_core._torch_compat import sync_flags_of

Place = tuple[nn.Module, str]


def replicate_parameters(
    parameters: Iterable[nn.Parameter], *, unit: nn.Module, mesh: DeviceMesh
) -> None:
    """Keep `parameters` of `unit` whole on every rank of `mesh`, and average their gradients.

    They become replicated DTensors, so that an optimizer may fuse its step over all parameters of
    the model; the forward of `unit` sees plain tensors. The average is taken whenever `unit`
    reduces its own gradients, so accumulation without sync works alike.
    """
    places = {id(parameter): _places(unit, parameter) for parameter in parameters}
    held = [place for group in places.values() for place in group]
    for group in places.values():
        _replicate(group, unit, mesh)
    if held:
        unit.register_forward_pre_hook(_show_local_tensors(held))
        unit.register_forward_hook(_hide_local_tensors(held), always_call=True)


def _places(unit: nn.Module, parameter: nn.Parameter) -> list[Place]:
    return [
        (module, name)
        for module in unit.modules()
        for name, own in module.named_parameters(recurse=False)
        if own is parameter
    ]


def _replicate(places: list[Place], unit: nn.Module, mesh: DeviceMesh) -> None:
    module, name = places[0]
    old = getattr(module, name)
    local = old.detach() if old.is_meta else old.detach().to(_device(mesh))
    whole = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    new = nn.Parameter(whole, requires_grad=old.requires_grad)
    if new.requires_grad:
        new.register_post_accumulate_grad_hook(_averaging_hook(unit, mesh))
    for module, name in places:
        setattr(module, name, new)


def _show_local_tensors(places: list[Place]) -> Callable[..., None]:
    """An instance attribute hides the parameter of the same name, which stays registered."""

    def show(*unused: Any) -> None:
        for module, name in places:
            whole = module.get_parameter(name)
            assert isinstance(whole, DTensor)
            vars(module)[name] = whole.to_local()

    return show


def _hide_local_tensors(places: list[Place]) -> Callable[..., None]:
    def hide(*unused: Any) -> None:
        for module, name in places:
            vars(module).pop(name, None)

    return hide


def _averaging_hook(unit: nn.Module, mesh: DeviceMesh) -> Callable[[torch.Tensor], None]:
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]

    def average(parameter: torch.Tensor) -> None:
        assert isinstance(unit, FSDPModule)
        gradient = parameter.grad
        reduces = all(reduce_grads for reduce_grads, _ in sync_flags_of(unit))
        if not isinstance(gradient, DTensor) or not reduces:
            return
        # Averaging what was averaged before changes nothing, so the sum of the micro-batches may
        # be reduced whole.
        local = gradient.to_local()
        total = local.float()
        for group in groups:
            dist.all_reduce(total, op=dist.ReduceOp.AVG, group=group)
        local.copy_(total)

    return average


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
