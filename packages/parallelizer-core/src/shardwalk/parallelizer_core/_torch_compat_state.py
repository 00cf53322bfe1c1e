"""Private torch that gradients, materialization and state dicts need; read in torch 2.13.0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


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
