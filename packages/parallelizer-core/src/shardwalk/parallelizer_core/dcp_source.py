"""Filling a model from a folder of torch.distributed.checkpoint, each rank on its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardwalk.parallelizer_core.checkpoint_source import (
    check_dtype,
    tie_difference,
    unexpected_keys,
)
from shardwalk.parallelizer_core.model_tensors import ModelTensor
from shardwalk.parallelizer_core.state_mismatch import StateMismatch

TRAINER_STATE = "trainer_state.pt"
MODEL_PREFIX = "model."


def stored_tensors(folder: Path) -> Mapping[str, TensorStorageMetadata]:
    """The tensors of a DCP folder by key."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        key: entry for key, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)
    }


def model_keys(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The model's tensors in a DCP folder by their names in the model.

    A folder of `save_checkpoint` holds them below ``model.``; any other folder is taken as a plain
    state dict of the model.
    """
    stored = stored_tensors(folder)
    prefix = key_prefix(folder)
    return {
        key.removeprefix(prefix): entry for key, entry in stored.items() if key.startswith(prefix)
    }


def key_prefix(folder: Path) -> str:
    """What stands before the names of the model's tensors in this folder."""
    return MODEL_PREFIX if (folder / TRAINER_STATE).is_file() else ""


def load_alone(state: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors with their parts of the folder, without any other rank.

    Raises:
        RuntimeError: naming the folder, when a part cannot be read.
    """
    try:
        with quiet_alone():
            dcp.load(state, checkpoint_id=folder, no_dist=True)
    except dcp.CheckpointException as error:  # no Exception: ``except Exception`` lets it pass
        raise RuntimeError(f"checkpoint {folder} cannot be read: {error}") from error


def check_files(folder: Path) -> None:
    """Raise a RuntimeError that names every file of a DCP folder that is missing or too short.

    Every rank looks at all files, its own or not, so that all raise alike without communication.
    """
    needed: dict[str, int] = {}
    for part in (dcp.FileSystemReader(folder).read_metadata().storage_data or {}).values():
        end = part.offset + part.length
        needed[part.relative_path] = max(end, needed.get(part.relative_path, 0))
    damaged = [
        f"{name} ({'too short' if (folder / name).is_file() else 'missing'})"
        for name, size in sorted(needed.items())
        if not (folder / name).is_file() or (folder / name).stat().st_size < size
    ]
    if damaged:
        raise RuntimeError(f"checkpoint {folder} is damaged: {', '.join(damaged)}")


@contextmanager
def quiet_alone() -> Iterator[None]:
    """DCP warns of ``no_dist=True`` even where it was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or")
        yield


def _saved_ties(folder: Path) -> list[list[str]]:
    """The names that were one tensor when `save_checkpoint` saved them."""
    if not (folder / TRAINER_STATE).is_file():
        return []
    state = torch.load(folder / TRAINER_STATE, map_location="cpu", weights_only=True)
    ties: list[list[str]] = state["ties"]
    return ties


class DCPSource:
    """Fills tensors from a DCP folder; native names, no adapter, no communication."""

    def __init__(self, folder: Path, ignore: Sequence[str] = ()) -> None:
        self._folder = folder
        self._ignore = ignore
        check_files(folder)
        self._stored = model_keys(folder)
        self._ties = [set(names) for names in _saved_ties(folder)]

    def check(self, entries: Sequence[ModelTensor]) -> None:
        """Raise for whatever does not fit, before anything is written."""
        mismatch = StateMismatch()
        for entry in entries:
            self._check_entry(entry, mismatch)
        claimed = {name for entry in entries for name in entry.names}
        mismatch.unexpected += unexpected_keys(self._stored, claimed, self._ignore)
        mismatch.raise_if_any(f"checkpoint {self._folder}", "List names to leave unread in ignore=")

    def fill(self, entries: Sequence[ModelTensor]) -> None:
        """Read this rank's part of every tensor."""
        self._load({self._names_present(e)[0]: e.tensor.detach() for e in entries})

    def _names_present(self, entry: ModelTensor) -> list[str]:
        return [name for name in entry.names if name in self._stored]

    def _check_entry(self, entry: ModelTensor, mismatch: StateMismatch) -> None:
        names = self._names_present(entry)
        if not names:
            mismatch.missing.append(entry.name)
        before = len(mismatch.differing)
        for name in names:
            stored = self._stored[name]
            mismatch.compare_shapes(name, entry.tensor.shape, stored.size)
            check_dtype(name, entry.tensor.dtype, stored.properties.dtype, mismatch)
        is_known_tie = any(tie.issuperset(names) for tie in self._ties)
        if len(names) > 1 and len(mismatch.differing) == before and not is_known_tie:
            first, *others = (self._whole(name) for name in names)
            for name, other in zip(names[1:], others, strict=True):
                if not torch.equal(first, other):
                    mismatch.differing.append(tie_difference(names[0], name))

    def _whole(self, name: str) -> Tensor:
        stored = self._stored[name]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
        self._load({name: tensor})
        return tensor

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        prefix = key_prefix(self._folder)
        state = {prefix + name: tensor for name, tensor in tensors.items()}
        load_alone(state, self._folder)
