"""Canonical state dicts: the names of the original model, whatever it was wrapped in.

Values are the sharded tensors themselves (DTensors, or plain tensors where nothing is sharded), or
with ``full=True`` plain tensors that equal those of one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core.checkpoint_source import check_dtype, tie_difference
from shardwalk.parallelizer_core.model_sequences import Models, as_models, reshard
from shardwalk.parallelizer_core.model_tensors import (
    ModelTensor,
    canonical_name,
    local_part,
    state_tensors,
    write_full,
)
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.state_mismatch import StateMismatch

_EXTRA_STATE = "_extra_state"


@torch.no_grad()
def model_state_dict(
    model_or_models: Models, *, full: bool = False, cpu: bool = False
) -> dict[str, Any]:
    """The state dict under the names of the original model.

    DDP, activation checkpointing and compile leave no trace in the names. Tied tensors stand under
    each of their names, as in torch.

    Args:
        model_or_models: the model, or the pipeline stages of this rank.
        full: give copies as plain full tensors, on every rank; all ranks must call this together.
            Otherwise values share the model's memory, and there is no communication.
        cpu: move values to the CPU, one at a time; full tensors only.

    Raises:
        ValueError: for ``cpu`` without ``full``.
    """
    if cpu and not full:
        raise ValueError("cpu=True needs full=True: sharded values share the model's memory")
    models = as_models(model_or_models)
    reshard(models)
    state: dict[str, Any] = {}
    for model in models:
        for name, value in unwrap_model(model).state_dict().items():
            state[canonical_name(name)] = value
    return gather_values(state, models, cpu=cpu) if full else state


@torch.no_grad()
def load_model_state_dict(
    model_or_models: Models, state_dict: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Copy a state dict into the model's own tensors, in place.

    Args:
        model_or_models: the model, or the pipeline stages of this rank.
        state_dict: by canonical names; full tensors or DTensors, of any floating dtype. DTensors
            of another layout than the model's are gathered, on all ranks together.
        strict: whether missing and unexpected names are an error. A tied tensor is there when one
            of its names is.

    Raises:
        TypeError: for a `strict` that is not a bool.
        StateMismatchError: a ValueError that lists every missing, unexpected and differing name,
            before anything is written.
    """
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be True or False, got {strict!r}")
    models = as_models(model_or_models)
    reshard(models)
    entries = state_tensors(models)
    extra = _extra_states(models)
    mismatch = StateMismatch()
    sources = [(entry, _source_of(entry, state_dict, mismatch)) for entry in entries]
    known = {name for entry in entries for name in entry.names} | extra.keys()
    if strict:
        mismatch.unexpected += [name for name in state_dict if name not in known]
        mismatch.missing += [name for name in extra if name not in state_dict]
    else:
        mismatch.missing.clear()
    mismatch.raise_if_any("the state dict", "Load it with strict=False to skip names that differ")
    for entry, source in sources:
        if source is not None:
            copy_values(entry.tensor, source)
    for name, module in extra.items():
        if name in state_dict:
            module.set_extra_state(state_dict[name])


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copy a tensor of any layout into one of the same shape."""
    if not isinstance(source, DTensor):
        write_full(target, source)
    elif has_layout_of(source, target):
        local_part(target).copy_(local_part(source))
    else:
        write_full(target, source.full_tensor())


def has_layout_of(source: Tensor, target: Tensor) -> bool:
    """Whether each rank holds the same part of both."""
    if isinstance(source, DTensor) and isinstance(target, DTensor):
        return source.device_mesh == target.device_mesh and source.placements == target.placements
    return not isinstance(source, DTensor) and not isinstance(target, DTensor)


def gather_values(
    state: Mapping[str, Any], models: Sequence[nn.Module], *, cpu: bool
) -> dict[str, Any]:
    """Copies of all values in full, tied names still one tensor."""
    first_names = {name: entry.name for entry in state_tensors(models) for name in entry.names}
    gathered: dict[str, Any] = {}
    for name, value in state.items():
        first = first_names.get(name, name)
        gathered[name] = gathered[first] if first in gathered else full_value(value, cpu=cpu)
    return gathered


def full_value(value: Any, *, cpu: bool) -> Any:
    """A tensor as a plain full copy; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().to("cpu" if cpu else full.device, copy=True)


def _source_of(
    entry: ModelTensor, state_dict: Mapping[str, Any], mismatch: StateMismatch
) -> Tensor | None:
    names = [name for name in entry.names if name in state_dict]
    if not names:
        mismatch.missing.append(entry.name)
        return None
    before = len(mismatch.differing)
    for name in names:
        value = state_dict[name]
        if not isinstance(value, Tensor):
            mismatch.differing.append(f"{name} (a {type(value).__name__}, not a tensor)")
            continue
        mismatch.compare_shapes(name, entry.tensor.shape, value.shape)
        check_dtype(name, entry.tensor.dtype, value.dtype, mismatch)
    first: Tensor = state_dict[names[0]]
    if len(mismatch.differing) == before:
        mismatch.differing += [
            tie_difference(names[0], name)
            for name in names[1:]
            if not _equal(first, state_dict[name])
        ]
    return first


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two values are the same; DTensors agree on the answer over all ranks."""
    return first is second or (first.dtype == second.dtype and torch.equal(first, second))


def _extra_states(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The modules that keep extra state, by its name in the state dict."""
    return {
        canonical_name(f"{name}.{_EXTRA_STATE}".lstrip(".")): module
        for model in models
        for name, module in unwrap_model(model).named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
