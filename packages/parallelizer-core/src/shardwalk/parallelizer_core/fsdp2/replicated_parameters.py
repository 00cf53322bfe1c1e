"""Parameters that stay whole beside a unit: replicated, with gradients averaged after backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from shardwalk.parallelizer_core._torch_compat import after_backward, sync_flags_of
from shardwalk.parallelizer_core.parallel_state import current_device, fsdp_units

Place = tuple[nn.Module, str]

_held: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(frozen=True)
class _Held:
    """The whole parameters of one unit: where each stands, the same one in a group."""

    places: list[list[Place]]
    mesh: DeviceMesh

    def flat_places(self) -> Iterator[Place]:
        return (place for group in self.places for place in group)


def replicate_parameters(
    parameters: Iterable[nn.Parameter], *, unit: nn.Module, mesh: DeviceMesh
) -> None:
    """Keep `parameters` of `unit` whole on every rank of `mesh`.

    They become replicated DTensors, so that an optimizer may fuse its step over all parameters of
    the model; from the forward of `unit` until the end of its backward their modules show plain
    tensors. `average_replicated_gradients` sees to their gradients.
    """
    held = _Held([_places(unit, parameter) for parameter in parameters], mesh)
    if not held.places:
        return
    for group in held.places:
        _replicate(group, mesh)
    _held[unit] = held
    unit.register_forward_pre_hook(_show_local_tensors(held))
    unit.register_forward_hook(_hide_without_backward(held), always_call=True)


def average_replicated_gradients(model: nn.Module) -> None:
    """Let every backward of `model` end with one average of what `replicate_parameters` holds.

    One buffer holds all of them, so that ranks and micro-batches may use different ones; what no
    rank used keeps no gradient. Nothing is added to a model that holds none.
    """
    units = {unit: _held[unit] for unit in fsdp_units(model) if unit in _held}
    if units:
        after_backward(model, lambda: _finish_backward(units))


def _finish_backward(units: dict[FSDPModule, _Held]) -> None:
    for unit, held in units.items():
        _hide(held)
        # Averaging what was averaged before changes nothing, so the sum of the micro-batches may
        # be reduced whole.
        if all(all(flags) for flags in sync_flags_of(unit)) and held.mesh.size() > 1:
            _average([module.get_parameter(name) for (module, name), *_ in held.places], held.mesh)


def _average(parameters: list[nn.Parameter], mesh: DeviceMesh) -> None:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    wide = reduce(torch.promote_types, (_real(p).dtype for p in trained), torch.float32)
    used = torch.tensor(
        [p.grad is not None for p in trained], dtype=wide, device=current_device(mesh.device_type)
    )
    parts = [torch.zeros(_real(p).shape) if p.grad is None else _real(p.grad) for p in trained]
    buffer = torch.cat([used, *(part.to(used).flatten() for part in parts)])
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=mesh.get_group(dim))
    flags, *means = buffer.split([len(trained), *(part.numel() for part in parts)])
    for parameter, flag, mean in zip(trained, flags.tolist(), means, strict=True):
        if flag > 0:
            _set_gradient(parameter, mean)


def _set_gradient(parameter: nn.Parameter, mean: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    real = _real(parameter.grad)
    real.copy_(mean.view(real.shape))


def _real(tensor: Tensor) -> Tensor:
    """The local values, complex ones as pairs, without a gradient."""
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return torch.view_as_real(local) if local.is_complex() else local


def _places(unit: nn.Module, parameter: nn.Parameter) -> list[Place]:
    return [
        (module, name)
        for module in unit.modules()
        for name, own in module.named_parameters(recurse=False)
        if own is parameter
    ]


def _replicate(places: list[Place], mesh: DeviceMesh) -> None:
    module, name = places[0]
    old = getattr(module, name)
    local = old.detach() if old.is_meta else old.detach().to(current_device(mesh.device_type))
    whole = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    new = nn.Parameter(whole, requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    for module, name in places:
        setattr(module, name, new)


def _show_local_tensors(held: _Held) -> Callable[..., None]:
    """An instance attribute hides the parameter of the same name, which stays registered."""

    def show(*unused: Any) -> None:
        _hide(held)
        for module, name in held.flat_places():
            whole = module.get_parameter(name)
            assert isinstance(whole, DTensor)
            vars(module)[name] = whole.to_local()

    return show


def _hide_without_backward(held: _Held) -> Callable[..., None]:
    def hide(*unused: Any) -> None:
        if not torch.is_grad_enabled():
            _hide(held)

    return hide


def _hide(held: _Held) -> None:
    for module, name in held.flat_places():
        vars(module).pop(name, None)
