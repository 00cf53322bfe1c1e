"""Parameters that stay whole beside a unit: replicated, with gradients averaged after backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from shardwalk.parallelizer_core._torch_compat import (
    after_backward,
    concatenate_meshes,
    sync_flags_of,
)
from shardwalk.parallelizer_core.parallel_state import current_device, fsdp_units

Place = tuple[nn.Module, str]

_held: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(frozen=True)
class _Layout:
    """How a DTensor lies over its ranks."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, local: Tensor) -> DTensor:
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def beside(self, other: _Layout) -> _Layout:
        mesh = concatenate_meshes([self.mesh, other.mesh])
        return replace(self, mesh=mesh, placements=(*self.placements, *other.placements))


@dataclass(frozen=True)
class _Whole:
    """One parameter: where it stands, and how it lay over other axes before."""

    places: list[Place]
    before: _Layout | None

    def get(self) -> DTensor:
        module, name = self.places[0]
        whole = module.get_parameter(name)
        assert isinstance(whole, DTensor)
        return whole

    def shown(self) -> Tensor:
        """What a forward computes with: as it was before it became whole over the mesh."""
        local = self.get().to_local()
        return local if self.before is None else self.before.of(local)


@dataclass(frozen=True)
class _Held:
    """The whole parameters of one unit."""

    parameters: list[_Whole]
    mesh: DeviceMesh

    def flat_places(self) -> Iterator[Place]:
        return (place for parameter in self.parameters for place in parameter.places)


def replicate_parameters(
    parameters: Iterable[nn.Parameter], *, unit: nn.Module, mesh: DeviceMesh
) -> None:
    """Keep `parameters` of `unit` whole on every rank of `mesh`.

    They become replicated DTensors, so that an optimizer may fuse its step over all parameters of
    the model; from the forward of `unit` until the end of its backward their modules show plain
    tensors. One that is a DTensor over other axes (tensor-parallel ones) is one over both, and is
    shown as it was. `average_replicated_gradients` sees to their gradients over `mesh`.
    """
    held = _Held([_replicate(_places(unit, each), mesh) for each in parameters], mesh)
    if not held.parameters:
        return
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
            _average([whole.get() for whole in held.parameters], held.mesh)


def _average(parameters: Sequence[Tensor], mesh: DeviceMesh) -> None:
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


def _set_gradient(parameter: Tensor, mean: Tensor) -> None:
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


def _replicate(places: list[Place], mesh: DeviceMesh) -> _Whole:
    module, name = places[0]
    old = getattr(module, name)
    local, before = old.detach(), None
    layout = _Layout(mesh, (Replicate(),) * mesh.ndim, old.shape, old.stride())
    if isinstance(local, DTensor):
        before = _Layout(local.device_mesh, local.placements, old.shape, old.stride())
        layout = layout.beside(before)
        local = local.to_local()
    if not old.is_meta:
        local = local.to(current_device(mesh.device_type))
    new = nn.Parameter(layout.of(local), requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    for module, name in places:
        setattr(module, name, new)
    return _Whole(places, before)


def _show_local_tensors(held: _Held) -> Callable[..., None]:
    """An instance attribute hides the parameter of the same name, which stays registered."""

    def show(*unused: Any) -> None:
        _hide(held)
        for whole in held.parameters:
            tensor = whole.shown()
            for module, name in whole.places:
                vars(module)[name] = tensor

    return show


def _hide_without_backward(held: _Held) -> Callable[..., None]:
    def hide(*unused: Any) -> None:
        if not torch.is_grad_enabled():
            _hide(held)

    return hide


def _hide(held: _Held) -> None:
    for module, name in held.flat_places():
        vars(module).pop(name, None)
