"""Correction biases that move towards balance: equal on every rank, from the loads of all ranks.

After a step, the bias of each expert that got fewer tokens than the mean rises by the speed, and
that of each that got more falls by it (arXiv:2408.15664). Loads are integers and are summed as
such, so that all ranks take the very same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwalk.moe_ep.balance_loss import Models
from shardwalk.moe_ep.gate_groups import sum_over
from shardwalk.moe_ep.router import Gate, find_gates, local_value

_attached: WeakKeyDictionary[Gate, ReferenceType[_Updates]] = WeakKeyDictionary()


def replicate_router_biases(model_or_models: Models, mesh: DeviceMesh) -> None:
    """Make the correction bias of every gate a DTensor replicated over `mesh`.

    `parallelize_model` has it done already, over dp x cp. Each rank keeps its values (on the meta
    device too), so nothing is communicated; a second call does nothing.

    Raises:
        TypeError: `mesh` is no DeviceMesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got a {type(mesh).__name__}")
    for gate in find_gates(model_or_models):
        gate.replicate_bias(mesh)


@torch.no_grad()
def update_router_biases(model_or_models: Models) -> None:
    """Move the correction biases by the loads since the last update, and count loads anew.

    All ranks of a pipeline stage call it together, after the step; it costs one all-reduce for all
    gates (two where tokens are split over tp in a pipeline). A gate without a correction bias, or
    with `bias_update_speed` 0, keeps what it has.
    """
    gates = list(find_gates(model_or_models))
    moved = [gate for gate in gates if moves(gate)]
    for gate, load in zip(moved, global_loads(moved), strict=True):
        assert gate.e_score_correction_bias is not None
        bias = local_value(gate.e_score_correction_bias)
        missing = (load.sum() - load * len(load)).sign()  # of the mean minus the load, exactly
        bias.add_(missing.to(bias.device, bias.dtype), alpha=gate.config.bias_update_speed)
    for gate in gates:
        gate.reset_load()


def attach_router_bias_update(model_or_models: Models, optimizer: Optimizer) -> RemovableHandle:
    """Let every `optimizer.step()` end with `update_router_biases`.

    Args:
        model_or_models: the model, or the pipeline stages of this rank.
        optimizer: the one whose steps are the steps of training; all ranks take each together.

    Returns:
        A handle whose `remove()` ends it.

    Raises:
        TypeError: `optimizer` has no step post-hooks.
        ValueError: no gate has a correction bias that an update moves, or one has an update
            attached already, which would move it twice.
    """
    gates = [gate for gate in find_gates(model_or_models) if moves(gate)]
    _refuse_attaching(gates, optimizer)
    updates = _Updates(model_or_models)
    handle: RemovableHandle = optimizer.register_step_post_hook(updates)
    updates.hooks = handle.hooks_dict_ref
    updates.hook_id = handle.id
    for gate in gates:
        _attached[gate] = ref(updates)
    return handle


def moves(gate: Gate) -> bool:
    """Whether an update moves the correction bias of `gate`."""
    return gate.e_score_correction_bias is not None and gate.config.bias_update_speed > 0


def global_loads(gates: Sequence[Gate]) -> list[Tensor]:
    """The loads of gates over all ranks of the stage, int64 [E] each; one all-reduce."""
    if not gates:
        return []
    groups = gates[0].counts_over.stage
    if any(gate.counts_over.stage != groups for gate in gates):
        raise ValueError(
            "the gates count over different ranks; parallelize them with one mesh, or pass the "
            "models one by one"
        )
    loads = [gate.load for gate in gates]
    summed = sum_over(groups, torch.cat([load.to(loads[0].device) for load in loads]))
    return list(summed.split([len(load) for load in loads]))


class _Updates:
    """The hook on an optimizer; it lives as long as the optimizer keeps it."""

    hooks: Any
    hook_id: int

    def __init__(self, models: Models) -> None:
        self._models = models

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        update_router_biases(self._models)

    def is_attached(self) -> bool:
        hooks = self.hooks()
        return hooks is not None and self.hook_id in hooks


def _refuse_attaching(gates: list[Gate], optimizer: Optimizer) -> None:
    if not hasattr(optimizer, "register_step_post_hook"):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__name__}; call "
            f"update_router_biases(model) after each step of another kind"
        )
    if not gates:
        raise ValueError(
            "no gate of the model has a correction bias to update; build the model with "
            "bias_update_speed above 0, and with correction_bias=True where that is a choice: in "
            "the MoEConfig of its layers, or as the arguments of a model that makes them itself"
        )
    updates = [found() for gate in gates if (found := _attached.get(gate)) is not None]
    if any(update is not None and update.is_attached() for update in updates):
        raise ValueError(
            "the router biases of this model have an update attached to an optimizer already; call "
            "remove() on the handle that attach_router_bias_update returned first"
        )
