"""Every touch of a private torch API in this package, and the guards for faults of torch itself.

Read in torch 2.13.0; the attributes used have the same names in 2.11 and 2.12 unless a function
says otherwise. Guards override methods on the units that shardwalk makes, never on torch's classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TorchDispatchMode",
    "forget_interrupted_forward",
    "forward_was_interrupted",
    "guard_fsdp_units",
    "own_linear_output",
    "unit_reduces_gradients",
]


def guard_fsdp_units(model: nn.Module) -> None:
    """Install the guards below on every FSDP2 unit of `model`; a second call changes nothing."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            for group in _param_groups(unit):
                _guard_parameters_never_gathered(group)
                _guard_mixed_gradient_dtypes(group)


def unit_reduces_gradients(unit: FSDPModule) -> bool:
    """Whether the next backward of `unit` communicates its gradients."""
    return all(group.reduce_grads for group in _param_groups(unit))


def forward_was_interrupted(root: FSDPModule) -> bool:
    """Whether a forward that `root` started has not come to its end."""
    return _state(root)._state_ctx.iter_forward_root is not None


def forget_interrupted_forward(root: FSDPModule) -> None:
    """Bring `root` and its units back to where a forward can start."""
    root.reset_iter_state()


def own_linear_output(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook for `nn.Linear`: the same values as a tensor that is not a view.

    With a bias and more than two input dimensions, torch 2.13 returns a view of a matrix that
    nobody else holds; an in-place op on it would drop the hook FSDP2 puts on the output, and FSDP2
    warns of that.
    """
    if isinstance(output, torch.Tensor) and output._is_view():
        return torch.ops.aten._unsafe_view.default(output, output.shape)
    return output


def _state(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()


def _param_groups(unit: FSDPModule) -> list[Any]:
    return list(_state(unit)._fsdp_param_groups)


def _guard_parameters_never_gathered(group: Any) -> None:
    """A backward without sync must pass over a unit that never ran.

    torch 2.13 reads `_unsharded_param` of every parameter there and fails with an AttributeError
    when the unit was never gathered and the reduction dtype differs from the parameter's.
    """
    for param in group.fsdp_params:
        if "to_accumulated_grad_if_needed" not in vars(param):
            param.to_accumulated_grad_if_needed = _only_if_gathered(param)


def _only_if_gathered(param: Any) -> Any:
    original = param.to_accumulated_grad_if_needed

    def to_accumulated_grad_if_needed() -> None:
        if hasattr(param, "_unsharded_param"):
            original()

    return to_accumulated_grad_if_needed


def _guard_mixed_gradient_dtypes(group: Any) -> None:
    """The reduction of a unit must find one gradient dtype, whatever each micro-batch used.

    torch 2.13 keeps gradients of backwards without sync in the reduction dtype; a parameter first
    used in the last micro-batch still has its gradient in the compute dtype, and the two in one
    reduction are an error.
    """
    if "post_backward" in vars(group):
        return
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        if group.reduce_grads:
            _align_gradient_dtypes(group)
        original(*unused)

    group.post_backward = post_backward


def _align_gradient_dtypes(group: Any) -> None:
    gathered = [param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    if all(param.unsharded_accumulated_grad is None for param in gathered):
        return
    for param in gathered:
        if param.unsharded_accumulated_grad is not None:
            continue
        param.to_accumulated_grad_if_needed()
        unused = param.unsharded_accumulated_grad is None and param._unsharded_param.grad is None
        if unused and group.reduce_scatter_unused_params and param._unsharded_param.requires_grad:
            param.unsharded_accumulated_grad = torch.zeros_like(
                param._unsharded_param, dtype=param.reduce_dtype
            )
