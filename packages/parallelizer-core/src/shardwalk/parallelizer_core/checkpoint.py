"""Training checkpoints that load on any mesh: model, optimizer, scheduler, random numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwalk.parallelizer_core.agreed_failure import on_all_ranks
from shardwalk.parallelizer_core.dcp_source import (
    MODEL_PREFIX,
    TRAINER_STATE,
    DCPSource,
    load_alone,
    quiet_alone,
    stored_tensors,
)
from shardwalk.parallelizer_core.model_sequences import (
    Models,
    as_models,
    reshard,
    shared_mesh_context,
)
from shardwalk.parallelizer_core.model_tensors import state_tensors
from shardwalk.parallelizer_core.optimizer_state import (
    match_groups,
    named_parameters,
    optimizer_state_dict,
    set_state,
    shape_difference,
    state_tensor_like,
)
from shardwalk.parallelizer_core.random_state import (
    random_layout,
    random_state,
    reseed,
    set_random_state,
)
from shardwalk.parallelizer_core.state_dicts import model_state_dict
from shardwalk.parallelizer_core.state_mismatch import StateMismatch
from shardwalk.parallelizer_core.trainer_state import (
    Stateful,
    check_optimizer_kind,
    read_trainer_state,
    trainer_state,
)

_OPTIMIZER_PREFIX = "optimizer.state."


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """What `load_checkpoint` found besides the tensors.

    Attributes:
        step: the step given to `save_checkpoint`, or None.
        extra: the plain data given to `save_checkpoint`; empty when none was.
        random_state_restored: True when every generator continues where it was; False when the
            layout of ranks differs and generators were seeded anew.
    """

    step: int | None
    extra: dict[str, Any]
    random_state_restored: bool


def save_checkpoint(
    folder: str | Path,
    model_or_models: Models,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a training run into a folder that all ranks see; all ranks call this together.

    Tensors go through torch.distributed.checkpoint, each shard written once, under canonical names
    (``model.<name>``, ``optimizer.state.<name>.<key>``). The rest is plain data in
    ``trainer_state.pt``, written last: a folder without it is no complete checkpoint. The random
    state of each rank stands in a file beside it.

    Args:
        folder: made when it is not there. A checkpoint in it is deleted first: save each step into
            a folder of its own to have one to go back to.
        model_or_models: the model, or the pipeline stages of this rank.
        optimizer: an optimizer over parameters of the model.
        scheduler: a learning-rate scheduler, or anything with ``state_dict()`` of plain data.
        step: the number of steps done.
        extra: more plain data: numbers, strings, tensors, and containers of these.
        process_group: the ranks that hold the model, when these are not all.

    Raises:
        TypeError: for state that is not plain data, which could not be loaded safely; ranks whose
            own state is fine raise a RuntimeError.
        RuntimeError: on every rank, when writing fails on one.
    """
    models = as_models(model_or_models)
    folder = Path(folder)

    def collect() -> tuple[dict[str, Any], dict[str, Any]]:
        optimizer_state = None if optimizer is None else optimizer_state_dict(models, optimizer)
        tensors = {MODEL_PREFIX + name: value for name, value in model_state_dict(models).items()}
        tensors |= _optimizer_tensors(optimizer_state)
        _check_tensors(tensors)
        return tensors, trainer_state(models, optimizer, optimizer_state, scheduler, step, extra)

    tensors, trainer = on_all_ranks(collect, process_group)
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0
    on_all_ranks(lambda: _clear_folder(folder, rank), process_group)
    on_all_ranks(lambda: _write_random_state(folder), process_group)
    _save_tensors(folder, tensors, process_group)
    on_all_ranks(lambda: _write(folder / TRAINER_STATE, trainer, rank), process_group)


def load_checkpoint(
    folder: str | Path,
    model_or_models: Models,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
) -> LoadedCheckpoint:
    """Load a training run saved by `save_checkpoint`, on the same mesh or any other.

    Parameters and moments come back bit for bit, in place. The model must have real weights (a
    model on meta: ``materialize(model, checkpoint=folder)`` first). Each rank reads its own parts;
    there is no communication: files that are missing or cut short are noticed by every rank, a
    part that only one rank fails to read raises there alone. Generators continue where they were
    when the number of ranks and the sizes of the mesh are the saved ones; else they are seeded
    from the saved seed and step.

    Args:
        folder: where `save_checkpoint` saved.
        model_or_models: the model, or the pipeline stages of this rank.
        optimizer: built over the same parameters, in the same groups, as the saved one; state that
            it has is replaced. Leave it out to load the model alone.
        scheduler: loads what the saved scheduler's ``state_dict()`` gave.

    Raises:
        FileNotFoundError: when the folder holds no complete checkpoint.
        StateMismatchError: a ValueError listing missing, unexpected and differing names, raised on
            every rank before anything is written.
        ValueError: for an optimizer or a scheduler when none was saved, an optimizer of another
            kind than the saved one (Adam and AdamW are one kind), or a model on meta.
        RuntimeError: for a folder whose files are missing, cut short or not readable.
    """
    models = as_models(model_or_models)
    folder = Path(folder)
    trainer = read_trainer_state(folder)
    for name, given in (("optimizer", optimizer), ("scheduler", scheduler)):
        if given is not None and trainer[name] is None:
            raise ValueError(f"checkpoint {folder} was saved without {name}=; leave it out")
    reshard(models)
    entries = state_tensors(models)
    if any(entry.tensor.is_meta for entry in entries):
        raise ValueError(
            f"the model is on meta; call materialize(model, checkpoint={str(folder)!r}) first"
        )
    source = DCPSource(folder)
    source.check(entries)
    load_optimizer = (
        _optimizer_loader(folder, models, optimizer, trainer) if optimizer is not None else None
    )
    source.fill(entries)
    if load_optimizer is not None:
        load_optimizer()
    if scheduler is not None:
        scheduler.load_state_dict(trainer["scheduler"])
    restored = _load_random_state(folder, models, trainer)
    return LoadedCheckpoint(
        step=trainer["step"], extra=trainer["extra"], random_state_restored=restored
    )


def _save_tensors(
    folder: Path, tensors: dict[str, Any], process_group: dist.ProcessGroup | None
) -> None:
    alone = not dist.is_initialized()
    try:
        with quiet_alone() if alone else nullcontext():
            dcp.save(tensors, checkpoint_id=folder, process_group=process_group, no_dist=alone)
    except dcp.CheckpointException as error:  # raised on every rank; not an Exception
        raise RuntimeError(f"saving to {folder} failed: {error}") from error


def _check_tensors(tensors: Mapping[str, Any]) -> None:
    others = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if others:
        raise TypeError(
            f"a checkpoint holds tensors only, and these are not: {', '.join(others)}; keep extra "
            "state of modules in buffers"
        )


def _optimizer_tensors(state: dict[str, Any] | None) -> dict[str, Tensor]:
    return {
        f"{_OPTIMIZER_PREFIX}{name}.{key}": value
        for name, entry in (state or {"state": {}})["state"].items()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }


def _optimizer_loader(
    folder: Path, models: list[nn.Module], optimizer: Optimizer, trainer: Mapping[str, Any]
) -> Callable[[], None]:
    """Check the saved optimizer against this one; what is returned loads it."""
    saved, parameters = trainer["optimizer"], named_parameters(models, optimizer)
    kind = trainer.get("optimizer_kind")
    if kind is not None:
        check_optimizer_kind(folder, optimizer, kind)
        if kind["classes"][0] != type(optimizer).__name__:
            for group in saved["param_groups"]:
                group.pop("decoupled_weight_decay", None)  # what tells AdamW from Adam
    mismatch = StateMismatch()
    groups = match_groups(models, optimizer, saved["param_groups"], mismatch)
    state: dict[str, dict[str, Any]] = {
        name: dict(entry) for name, entry in saved["scalars"].items()
    }
    tensors: dict[str, Tensor] = {}
    for full_key, stored in stored_tensors(folder).items():
        if not full_key.startswith(_OPTIMIZER_PREFIX):
            continue
        name, _, key = full_key.removeprefix(_OPTIMIZER_PREFIX).rpartition(".")
        if name not in parameters:
            mismatch.unexpected.append(f"{name} (its {key})")
            continue
        dtype = stored.properties.dtype
        tensor = state_tensor_like(parameters[name], key, stored.size, dtype)
        if tensor is None:
            mismatch.differing.append(shape_difference(name, key, parameters[name], stored.size))
        else:
            tensors[full_key] = state.setdefault(name, {})[key] = tensor
    mismatch.raise_if_any(
        f"the optimizer of checkpoint {folder}",
        "Build the optimizer over the same parameters in as many groups as the saved one",
    )

    def load() -> None:
        load_alone(tensors, folder)
        set_state(optimizer, parameters, state, groups)

    return load


def _load_random_state(folder: Path, models: list[nn.Module], trainer: Mapping[str, Any]) -> bool:
    context = shared_mesh_context(models)
    path = _random_state_file(folder, dist.get_rank() if dist.is_initialized() else 0)
    if trainer["random"]["layout"] != random_layout(context) or not path.is_file():
        reseed(context, trainer["random"]["seed"], trainer["step"])
        return False
    set_random_state(torch.load(path, map_location="cpu", weights_only=True))
    return True


def _random_state_file(folder: Path, rank: int) -> Path:
    return folder / f"random_state_{rank}.pt"


def _clear_folder(folder: Path, rank: int) -> None:
    """Make the folder, without the files of an earlier checkpoint."""
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in (TRAINER_STATE, ".metadata", "*.distcp", "random_state_*.pt"):
            for path in folder.glob(pattern):
                path.unlink()


def _write_random_state(folder: Path) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.save(random_state(), _random_state_file(folder, rank))


def _write(path: Path, state: Mapping[str, Any], rank: int) -> None:
    if rank == 0:
        part = path.with_suffix(".part")
        torch.save(dict(state), part)
        os.replace(part, path)
