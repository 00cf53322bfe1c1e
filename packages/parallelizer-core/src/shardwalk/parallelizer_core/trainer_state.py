"""What a checkpoint holds besides tensors of the model and the optimizer: plain data."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwalk.parallelizer_core.dcp_source import TRAINER_STATE
from shardwalk.parallelizer_core.model_sequences import shared_mesh_context
from shardwalk.parallelizer_core.model_tensors import state_tensors
from shardwalk.parallelizer_core.random_state import random_layout

_FORMAT = 1


class Stateful(Protocol):
    """Anything with a state dict of plain data, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state of `state_dict`."""
        ...


def trainer_state(
    models: Sequence[nn.Module],
    optimizer: Optimizer | None,
    optimizer_state: dict[str, Any] | None,
    scheduler: Stateful | None,
    step: int | None,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What is no tensor of the model or the optimizer, checked to be plain data.

    Raises:
        TypeError: naming the part that is not.
    """
    state = {
        "format": _FORMAT,
        "step": step,
        "extra": dict(extra or {}),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "optimizer": None if optimizer_state is None else _optimizer_scalars(optimizer_state),
        "optimizer_kind": None if optimizer is None else optimizer_kind(optimizer),
        "ties": [entry.names for entry in state_tensors(models) if len(entry.names) > 1],
        "random": {
            "layout": random_layout(shared_mesh_context(models)),
            "seed": torch.initial_seed(),
        },
    }
    for name, value in state.items():
        _check_plain(name, value)
    return state


def _check_plain(name: str, value: object) -> None:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise TypeError(
            f"{name} of a checkpoint must be plain data (numbers, strings, tensors, and lists, "
            f"tuples and dicts of these): {error}"
        ) from error


def _optimizer_scalars(state: dict[str, Any]) -> dict[str, Any]:
    scalars = {
        name: {key: value for key, value in entry.items() if not isinstance(value, Tensor)}
        for name, entry in state["state"].items()
    }
    return {"param_groups": state["param_groups"], "scalars": scalars}


def optimizer_kind(optimizer: Optimizer) -> dict[str, list[str]]:
    """The names of its class and of the optimizers it derives from, and of its state tensors."""
    cls = type(optimizer)
    bases = [base for base in cls.__mro__[1:] if issubclass(base, Optimizer)]
    keys = {key for entry in optimizer.state.values() for key in entry}
    return {
        "classes": [base.__name__ for base in (cls, *bases) if base is not Optimizer],
        "state_keys": sorted(map(str, keys)),
    }


def check_optimizer_kind(folder: Path, optimizer: Optimizer, saved: dict[str, list[str]]) -> None:
    """Raise a ValueError when the saved state is that of another kind of optimizer.

    Kinds are alike when one derives from the other (AdamW from Adam), or when the given optimizer
    has stepped already and keeps state under the saved names.
    """
    given = optimizer_kind(optimizer)
    alike = set(given["classes"]) & set(saved["classes"])
    if alike or (given["state_keys"] and given["state_keys"] == saved["state_keys"]):
        return
    raise ValueError(
        f"checkpoint {folder} was saved with the optimizer {saved['classes'][0]} (state: "
        f"{', '.join(saved['state_keys']) or 'none'}), which {given['classes'][0]} cannot go on "
        "from; build the saved kind of optimizer, or leave out optimizer="
    )


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """Load it without running anything it may hold.

    Raises:
        FileNotFoundError: when the folder holds no complete checkpoint.
        RuntimeError: naming the file, when it is damaged.
        ValueError: for a format of another version.
    """
    path = folder / TRAINER_STATE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no complete checkpoint: no {TRAINER_STATE} in it")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: not a zip, not a pickle, not plain data
        raise RuntimeError(f"{path} cannot be read: {error}") from error
    if state["format"] != _FORMAT:
        raise ValueError(f"{path} has format {state['format']}; this version reads {_FORMAT}")
    return state
