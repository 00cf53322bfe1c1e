"""The state of an optimizer by parameter name, so that it fits any mesh and any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwalk.parallelizer_core.model_sequences import Models, as_models, reshard
from shardwalk.parallelizer_core.model_tensors import state_tensors
from shardwalk.parallelizer_core.state_dicts import copy_values, full_value, has_layout_of
from shardwalk.parallelizer_core.state_mismatch import StateMismatch

_WAY_OUT = "Build the optimizer over the same parameters in as many groups as the saved one"


@torch.no_grad()
def optimizer_state_dict(
    model_or_models: Models, optimizer: Optimizer, *, full: bool = False, cpu: bool = False
) -> dict[str, Any]:
    """The optimizer's state by canonical parameter names.

    Args:
        model_or_models: the model whose parameters the optimizer steps.
        optimizer: any torch optimizer over parameters of the model.
        full: give copies as plain full tensors, on every rank, which must call this together.
        cpu: move these to the CPU; full tensors only.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}``; a
        parameter that was never stepped has no entry in ``state``.

    Raises:
        ValueError: when the optimizer steps a parameter that the model does not hold (any more),
            or for ``cpu`` without ``full``.
    """
    if cpu and not full:
        raise ValueError("cpu=True needs full=True: sharded values share the optimizer's memory")
    models = as_models(model_or_models)
    reshard(models)
    names = parameter_names(models, optimizer)
    state = {
        names[id(parameter)]: {
            key: full_value(value, cpu=cpu) if full else value for key, value in entry.items()
        }
        for parameter, entry in optimizer.state.items()
        if isinstance(parameter, Tensor)
    }
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def load_optimizer_state_dict(
    model_or_models: Models, optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Give the optimizer a state saved by `optimizer_state_dict`, on this mesh or another.

    Raises:
        StateMismatchError: a ValueError naming what differs: parameters of a group, parameters
            with state that the optimizer does not step, shapes; before anything is written.
    """
    models = as_models(model_or_models)
    reshard(models)
    parameters = named_parameters(models, optimizer)
    mismatch = StateMismatch()
    groups = match_groups(models, optimizer, state_dict["param_groups"], mismatch)
    for name, entry in state_dict["state"].items():
        _check_entry(name, entry, parameters.get(name), mismatch)
    mismatch.raise_if_any("the optimizer state", _WAY_OUT)
    state = {
        name: {
            key: _like(key, value, parameters[name]) if isinstance(value, Tensor) else value
            for key, value in entry.items()
        }
        for name, entry in state_dict["state"].items()
    }
    set_state(optimizer, parameters, state, groups)


def parameter_names(models: Sequence[nn.Module], optimizer: Optimizer) -> dict[int, str]:
    """The canonical name of each parameter of the optimizer, by its id.

    Raises:
        ValueError: when the optimizer steps a parameter that the model does not hold.
    """
    names = {id(entry.tensor): entry.name for entry in state_tensors(models)}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {position} of group {number} of the optimizer (shape "
                    f"{list(parameter.shape)}) is not in the model; build the optimizer after "
                    "the model was parallelized"
                )
    return names


def named_parameters(models: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Tensor]:
    """The parameters the optimizer steps, by canonical name."""
    names = parameter_names(models, optimizer)
    return {
        names[id(parameter)]: parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def match_groups(
    models: Sequence[nn.Module],
    optimizer: Optimizer,
    saved: Sequence[Mapping[str, Any]],
    mismatch: StateMismatch,
) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Pairs of a group of the optimizer and the saved one at its place; differences collected."""
    names = parameter_names(models, optimizer)
    groups = optimizer.param_groups
    if len(groups) != len(saved):
        mismatch.differing.append(f"parameter groups (optimizer {len(groups)}, saved {len(saved)})")
        return []
    for number, (group, other) in enumerate(zip(groups, saved, strict=True)):
        own = {names[id(parameter)] for parameter in group["params"]}
        theirs = set(other["params"])
        mismatch.missing += [f"{name} (group {number})" for name in own - theirs]
        mismatch.unexpected += [f"{name} (group {number})" for name in theirs - own]
    return list(zip(groups, saved, strict=True))


def state_tensor_like(
    parameter: Tensor, key: str, shape: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    """Memory for one state tensor of a parameter: in its layout, or plain for a single number.

    None when the layout is not known: a tensor of another shape than its sharded parameter's.
    """
    if shape == parameter.shape and key != "step":
        return torch.empty_like(parameter, dtype=dtype).detach()
    if shape.numel() == 1:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if isinstance(parameter, DTensor):
        return None
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def shape_difference(name: str, key: str, parameter: Tensor, shape: Sequence[int]) -> str:
    """The line for a state tensor whose layout is not known."""
    return f"{name}.{key} (shape {list(shape)} beside a sharded {list(parameter.shape)})"


def set_state(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[tuple[dict[str, Any], Mapping[str, Any]]],
) -> None:
    """Put the state in place: entries of `state`, and the options of the saved groups."""
    optimizer.state.clear()
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group, saved in groups:
        for key, value in saved.items():
            if key == "params":
                continue
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)  # a compiled step holds on to the tensor
            else:
                group[key] = value
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            entry = state.get(names[id(parameter)])
            if entry is not None:
                optimizer.state[parameter] = {
                    key: _step_on(parameter, value) if key == "step" and on_device else value
                    for key, value in entry.items()
                }


def _step_on(parameter: Tensor, step: Any) -> Any:
    """Fused and capturable steps count on the parameter's device."""
    return step.to(parameter.device, torch.float32) if isinstance(step, Tensor) else step


def _check_entry(
    name: str, entry: Mapping[str, Any], parameter: Tensor | None, mismatch: StateMismatch
) -> None:
    if parameter is None:
        mismatch.unexpected.append(f"{name} (its state)")
        return
    mismatch.differing += [
        shape_difference(name, key, parameter, value.shape)
        for key, value in entry.items()
        if isinstance(value, Tensor) and not _fits(key, value, parameter)
    ]


def _fits(key: str, value: Tensor, parameter: Tensor) -> bool:
    return has_layout_of(value, parameter) or (
        state_tensor_like(parameter, key, value.shape, value.dtype) is not None
    )


def _like(key: str, value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of a state tensor in the layout of its parameter."""
    if has_layout_of(value, parameter):
        return value.detach().clone()
    target = state_tensor_like(parameter, key, value.shape, value.dtype)
    assert target is not None
    copy_values(target, value)
    return target
