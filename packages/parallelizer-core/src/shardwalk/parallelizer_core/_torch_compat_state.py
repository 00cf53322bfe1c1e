"""Private torch that gradients, materialization and state dicts need; read in torch 2.13.0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode


def param_groups_of(module: FSDPModule) -> list[FSDPParamGroup]:
    """The parameter groups of one FSDP2 unit (read in 2.13.0; no public way to read them)."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def sync_flags_of(module: FSDPModule) -> list[tuple[bool, bool]]:
    """Per group of the unit: whether it reduce-scatters, and whether it all-reduces (2.13.0)."""
    return [(group.reduce_grads, group.all_reduce_grads) for group in param_groups_of(module)]


def restore_sync_flags(module: FSDPModule, flags: Sequence[tuple[bool, bool]]) -> None:
    """Put back what `sync_flags_of` read; the public setters cannot, per group (2.13.0)."""
    for group, (reduce_grads, all_reduce_grads) in zip(param_groups_of(module), flags, strict=True):
        group.reduce_grads = reduce_grads
        group.all_reduce_grads = all_reduce_grads


def foreach_norms(tensors: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """The fp32 norm of each tensor in one fused call per device (2.13.0 spells it privately).

    The tensors share one device and dtype and none is empty.
    """
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=torch.float32))


def foreach_scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply the tensors of one device in place by a scalar tensor of that device (2.13.0)."""
    torch._foreach_mul_(list(tensors), factor)


def fsdp_units(model: nn.Module) -> Iterator[FSDPModule]:
    """Every FSDP2 unit of a model, children after their parents."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def is_persistent_buffer(module: nn.Module, name: str) -> bool:
    """Whether a buffer of the module is part of its state dict (2.13.0; only stored privately)."""
    return name not in module._non_persistent_buffers_set


def offloaded_parameters(model: nn.Module) -> set[int]:
    """The ids of sharded parameters that an offload policy keeps on the CPU (2.13.0)."""
    return {
        id(parameter.sharded_param)
        for unit in fsdp_units(model)
        for group in param_groups_of(unit)
        for parameter in group.fsdp_params
        if parameter.offload_to_cpu
    }


def move_hooks(source: Tensor, target: Tensor) -> None:
    """Make the gradient hooks of one leaf those of another too (2.13.0; survives a swap)."""
    target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks is not None:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


class RecordWrites(TorchDispatchMode):
    """Records which storages are written in place, through views and ``.data`` too (2.13.0).

    Version counters are not bumped by writes to ``.data``, which many initializers use.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written: set[int] = set()

    def wrote(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage was written."""
        return tensor.untyped_storage()._cdata in self._written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else given.get(argument.name)
            if argument.alias_info and argument.alias_info.is_write and isinstance(value, Tensor):
                self._written.add(value.untyped_storage()._cdata)
        return func(*args, **given)
