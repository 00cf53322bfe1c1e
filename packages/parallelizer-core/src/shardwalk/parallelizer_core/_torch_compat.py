"""Every touch of a private torch API in this package, and the guards for faults of torch itself.

Read in torch 2.13.0 and run in 2.11.0 too; where that differs, the function says so. Guards
override methods on the units that shardwalk makes, never on torch's classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from shardwalk.parallelizer_core.parallel_state import fsdp_units

__all__ = [
    "RecordWrites",
    "TorchDispatchMode",
    "after_backward",
    "argument_of",
    "as_own_tensor",
    "buffers_of",
    "compiler_backend",
    "compiler_errors",
    "concatenate_meshes",
    "copy_kept_outputs",
    "drop_unreduced_gradients",
    "exchange_parts",
    "enabled_attention_backends",
    "foreach_norms",
    "foreach_scale_",
    "forget_interrupted_forward",
    "forward_was_interrupted",
    "gathered_parameters",
    "gradient_hooks_of",
    "functional_collectives",
    "guard_fsdp_units",
    "is_graph_break",
    "is_operator",
    "is_persistent_buffer",
    "is_view",
    "move_hooks",
    "mutates_arguments",
    "offloaded_parameters",
    "own_linear_outputs",
    "own_output",
    "param_groups_of",
    "restore_sync_flags",
    "sharded_parameters",
    "sync_flags_of",
    "tensor_version",
    "without_innermost_mode",
    "written_arguments",
]


def guard_fsdp_units(model: nn.Module) -> None:
    """Install the guards below on every FSDP2 unit of `model`; a second call changes nothing."""
    for unit in fsdp_units(model):
        for group in param_groups_of(unit):
            _guard_parameters_never_gathered(group)
            _guard_mixed_gradient_dtypes(group)


def forward_was_interrupted(root: FSDPModule) -> bool:
    """Whether a forward that `root` started has not come to its end."""
    return _state(root)._state_ctx.iter_forward_root is not None


def forget_interrupted_forward(root: FSDPModule) -> None:
    """Bring `root` and its units back to where a forward can start.

    torch 2.13 has this as a method; 2.11 has the same state under the same names.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = _state(root)
    if state._device.type != "cpu":
        torch.accelerator.synchronize(state._device)  # before buffers in flight are let go
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    for unit_state in state._state_ctx.all_states:
        unit_state._modules_to_run_forward.clear()
        unit_state._training_state = TrainingState.IDLE
        for group in _groups_of(unit_state):
            _forget_iteration(group)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _forget_iteration(group: Any) -> None:
    """Drop what a group keeps while an iteration is under way, as of torch 2.11."""
    gathered = group._all_gather_result
    if gathered is not None and isinstance(gathered.all_gather_work, dist.Work):
        gathered.all_gather_work.wait()
    group._all_gather_result = group._partial_reduce_output = group._all_reduce_state = None
    group._post_reduce_event = group._reshard_after_forward_event = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def own_linear_outputs(module: nn.Module) -> None:
    """Let every biased `nn.Linear` outside the units of `module` return a tensor of its own.

    With a bias and more than two input dimensions, torch 2.13 returns a view of a matrix that
    nobody else holds. Where such an output leaves a unit, FSDP2 warns of it: an in-place op on a
    view drops the hook that gathers the weights for the backward.
    """
    if isinstance(module, nn.Linear) and module.bias is not None:
        own_output(module)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            own_linear_outputs(child)


def own_output(module: nn.Module) -> None:
    """Let `module` return a tensor of its own rather than a view of one that nobody holds."""
    if _own_output not in module._forward_hooks.values():
        module.register_forward_hook(_own_output)


def _own_output(module: nn.Module, args: Any, output: Any) -> Any:
    return as_own_tensor(output) if isinstance(output, Tensor) else output


def as_own_tensor(tensor: Tensor) -> Tensor:
    """The same values as a tensor that is no view, where nobody holds what it is a view of.

    torch 2.13's ``DTensor.to_local`` returns a view too. Whether a tensor is a view cannot be asked
    in a graph that is being traced, where the operator costs nothing.
    """
    if not torch.compiler.is_compiling() and not tensor._is_view():
        return tensor
    own: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)
    return own


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes the tensor for a view of another one (2.13.0)."""
    return tensor._base is not None


def after_backward(model: nn.Module, function: Callable[[], None]) -> None:
    """Call `function` at the end of every backward through a unit of `model`, once.

    Whichever unit comes first in a backward queues its own callback for the end (2.13.0).
    """
    for unit in fsdp_units(model):
        state = _state(unit)
        state._root_post_backward_final_callback = _followed_by(
            state._root_post_backward_final_callback, function
        )


def _followed_by(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def gradient_hooks_of(parameter: Tensor) -> bool:
    """Whether somebody registered a hook on the gradient of this tensor (2.13.0)."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _state(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()


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
        keeps_unused = getattr(group, "reduce_scatter_unused_params", False)  # not in torch 2.11
        if unused and keeps_unused and param._unsharded_param.requires_grad:
            param.unsharded_accumulated_grad = torch.zeros_like(
                param._unsharded_param, dtype=param.reduce_dtype
            )


def param_groups_of(module: FSDPModule) -> list[Any]:
    """The parameter groups of one FSDP2 unit (2.13.0; there is no public way to read them)."""
    return _groups_of(_state(module))


def _groups_of(state: Any) -> list[Any]:
    """The parameter groups in the state of a unit; in torch 2.11 it has one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def gathered_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The whole copies that FSDP2 made of its parameters, under these' names (2.13.0).

    They are what `parameters()` gives between a forward and its backward, and live on after it.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for unit in fsdp_units(model):
        for group in param_groups_of(unit):
            for param in group.fsdp_params:
                owner, name = param._module_info.module, param._module_info.param_name
                if hasattr(param, "_unsharded_param") and id(owner) in names:
                    yield f"{names[id(owner)]}.{name}".lstrip("."), param._unsharded_param


def sync_flags_of(module: FSDPModule) -> list[tuple[bool, bool]]:
    """Per group of the unit: whether it reduce-scatters, and whether it all-reduces (2.13.0)."""
    return [(group.reduce_grads, group.all_reduce_grads) for group in param_groups_of(module)]


def restore_sync_flags(module: FSDPModule, flags: Sequence[tuple[bool, bool]]) -> None:
    """Put back what `sync_flags_of` read; the public setters cannot, per group (2.13.0)."""
    for group, (reduce_grads, all_reduce_grads) in zip(param_groups_of(module), flags, strict=True):
        group.reduce_grads = reduce_grads
        group.all_reduce_grads = all_reduce_grads


def drop_unreduced_gradients(module: FSDPModule) -> None:
    """Forget what backwards without sync left in the unit for a later reduction (2.13.0).

    torch's ``zero_grad`` does not reach these gradients: they are kept beside the parameters.
    """
    for group in param_groups_of(module):
        group._partial_reduce_output = None
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def enabled_attention_backends() -> list[SDPBackend]:
    """What scaled dot-product attention may choose among, the first choice first (2.13.0)."""
    return list(_cur_sdpa_kernel_backends(with_priority=True))


def foreach_norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each tensor, in `dtype`, in one fused call (2.13.0 spells it privately).

    The tensors share one device and dtype and none is empty.
    """
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def foreach_scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply the tensors of one device in place by a scalar tensor of that device (2.13.0)."""
    torch._foreach_mul_(list(tensors), factor)


def compiler_backend(name: str) -> Callable[..., Any]:
    """The function that ``torch.compile(backend=name)`` makes of a graph and inputs (2.13.0)."""
    found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return found


def compiler_errors() -> tuple[type[Exception], ...]:
    """What the tracer raises, apart from errors of the traced code (2.13.0)."""
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def is_graph_break(error: Exception) -> bool:
    """Whether the tracer met code that it cannot take into one graph (2.13.0)."""
    from torch._dynamo import exc

    return isinstance(error, exc.Unsupported | exc.UserError)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several of one root, as FSDP2 makes it for a DTensor (2.13.0)."""
    return DeviceMesh._concatenate(list(meshes))


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own dict of its buffers, those that are None among them (2.13.0)."""
    return module._buffers


def is_persistent_buffer(module: nn.Module, name: str) -> bool:
    """Whether a buffer of the module is part of its state dict (2.13.0; only stored privately)."""
    return name not in module._non_persistent_buffers_set


def sharded_parameters(module: FSDPModule) -> list[Tensor]:
    """The shards of one unit, which `parameters()` does not give while it is gathered (2.13.0)."""
    return [param.sharded_param for group in param_groups_of(module) for param in group.fsdp_params]


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
        return _memory_of(tensor) in self._written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        self._written |= {_memory_of(each) for each in written_arguments(func, args, given)}
        return func(*args, **given)


def tensor_version(tensor: Tensor) -> int:
    """How often the tensor was changed in place; 0 where torch does not count (2.13.0)."""
    return 0 if tensor.is_inference() else tensor._version


def argument_of(op: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The value that a call of `op` gives an argument, its default, or None without one (2.13.0).

    Operators have no public signature.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return None
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            given = args[position] if position < len(args) else argument.default_value
            return kwargs.get(name, given)
    return None


def mutates_arguments(op: Any) -> bool:
    """Whether an operator writes to what it is given (2.13.0; only its schema says so)."""
    return isinstance(op, torch._ops.OpOverload) and bool(op._schema.is_mutable)


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call of `op` writes to (2.13.0; only its schema says so)."""
    if not mutates_arguments(op):
        return []
    names = [each.name for each in op._schema.arguments if each.is_write]
    given = tree_leaves([argument_of(op, name, args, kwargs) for name in names])
    return [each for each in given if isinstance(each, Tensor)]


def copy_kept_outputs(mode: Any, written: Iterable[Tensor]) -> None:
    """Copy what the forward mode of selective checkpointing keeps in the memory of `written`.

    Torch (2.13.0) notices a write by the version of what it keeps, and the view that a linear layer
    without a bias makes of its product has a version of its own: the recompute would read what was
    written.
    """
    memory = {_memory_of(each) for each in written}
    for calls in mode.storage.values():
        for kept in tree_leaves(list(calls.values() if isinstance(calls, dict) else calls)):
            value = getattr(kept, "val", None)
            if isinstance(value, Tensor) and _memory_of(value) in memory:
                kept.val = value.clone()
                kept.version = kept.val._version


def _memory_of(tensor: Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)


def is_operator(op: Any) -> bool:
    """Whether a dispatch mode may meet `op`: an overload or a higher-order operator (2.13.0)."""
    return isinstance(op, torch._ops.OpOverload | torch._ops.HigherOrderOperator)


def functional_collectives() -> Any:
    """The namespace of the collectives that return what they made (2.13.0)."""
    return torch.ops._c10d_functional


def without_innermost_mode() -> AbstractContextManager[Any]:
    """Take the innermost dispatch mode off the stack for a while (2.13.0).

    Inside ``__torch_dispatch__`` that is the mode below the one that dispatches.
    """
    return _pop_mode_temporarily()


def exchange_parts(
    x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Pieces of `x` along its first dimension from every rank to every rank (2.13.0).

    The gradient goes the way back. `torch.distributed.all_to_all_single` has none.
    """
    operators = torch.ops._c10d_functional_autograd
    moved = operators.all_to_all_single(x, received, sent, group.group_name)
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(moved)
    return waited
