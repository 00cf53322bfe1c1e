"""Filling a model from checkpoint files: the checks before, and this rank's blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from shardwalk.parallelizer_core.checkpoint_reading import CheckpointReader
from shardwalk.parallelizer_core.model_tensors import ModelTensor, local_index, local_part
from shardwalk.parallelizer_core.state_dict_adapter import Index, StateDictAdapter
from shardwalk.parallelizer_core.state_mismatch import StateMismatch

CASTABLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""The dtypes that convert into each other between a model and its files; no other is ever cast."""

_BLOCK_ELEMENTS = 1 << 24
_WAY_OUT = (
    "Give the model a state_dict_adapter when its files use other names or layouts, or list "
    "patterns of names to leave unread in ignore=; init= beside checkpoint= fills adapters"
)


class ReaderSource:
    """Fills tensors from a `CheckpointReader`, through the model's adapter."""

    def __init__(
        self, reader: CheckpointReader, adapter: StateDictAdapter, ignore: Sequence[str], what: str
    ) -> None:
        self._reader = reader
        self._adapter = adapter
        self._ignore = ignore
        self._what = what

    def check(self, entries: Sequence[ModelTensor]) -> None:
        """Raise for whatever does not fit, before anything is written."""
        mismatch = StateMismatch()
        claimed: set[str] = set()
        for entry in entries:
            claimed.update(*(self._shapes(name, entry) for name in entry.names))
            self._check_entry(entry, mismatch)
        mismatch.unexpected += unexpected_keys(self._reader.tensors, claimed, self._ignore)
        mismatch.raise_if_any(self._what, _WAY_OUT)

    def fill(self, entries: Sequence[ModelTensor]) -> None:
        """Read this rank's block of every tensor, and nothing else."""
        for entry in entries:
            local = local_part(entry.tensor)
            if local.numel():
                block = self._read(self._names_present(entry)[0], entry, local_index(entry.tensor))
                local.copy_(block.view(local.shape))

    def _shapes(self, name: str, entry: ModelTensor) -> Mapping[str, Sequence[int]]:
        return self._adapter.file_shapes(name, tuple(entry.tensor.shape))

    def _names_present(self, entry: ModelTensor) -> list[str]:
        """The names of a tied tensor under which the files hold all of it."""
        tensors = self._reader.tensors
        return [
            name for name in entry.names if all(k in tensors for k in self._shapes(name, entry))
        ]

    def _check_entry(self, entry: ModelTensor, mismatch: StateMismatch) -> None:
        present = self._names_present(entry)
        if not present:
            keys = self._shapes(entry.name, entry)
            absent = [key for key in keys if key not in self._reader.tensors]
            mismatch.missing += [_with_native_name(key, entry.name) for key in absent]
        before = len(mismatch.differing)
        for name in present:
            for key, shape in self._shapes(name, entry).items():
                info = self._reader.tensors[key]
                mismatch.compare_shapes(key, shape, info.shape)
                check_dtype(key, entry.tensor.dtype, info.dtype, mismatch)
        if len(present) > 1 and len(mismatch.differing) == before:
            self._check_tie(present, entry, mismatch)

    def _check_tie(self, names: list[str], entry: ModelTensor, mismatch: StateMismatch) -> None:
        """Every rank reads both in full, block by block, so that all come to the same verdict."""
        for other in names[1:]:
            for index in _row_blocks(entry.tensor.shape):
                if not torch.equal(
                    self._read(names[0], entry, index), self._read(other, entry, index)
                ):
                    mismatch.differing.append(tie_difference(names[0], other))
                    break

    def _read(self, name: str, entry: ModelTensor, index: Index) -> Tensor:
        return self._adapter.read(name, tuple(entry.tensor.shape), index, self._reader.read)


def unexpected_keys(
    present: Mapping[str, object], claimed: set[str], ignore: Sequence[str]
) -> list[str]:
    """The keys nobody claims and no pattern excuses.

    Raises:
        ValueError: for a pattern that excuses none of the unclaimed keys.
    """
    unclaimed = [key for key in present if key not in claimed]
    for pattern in ignore:
        if not any(fnmatchcase(key, pattern) for key in unclaimed):
            raise ValueError(
                f"ignore={pattern!r} matches no name in the checkpoint that the model lacks; "
                f"remove it (those there are: {', '.join(unclaimed[:20]) or 'none'})"
            )
    return [key for key in unclaimed if not any(fnmatchcase(key, p) for p in ignore)]


def check_dtype(
    key: str, model: torch.dtype, source: torch.dtype | None, mismatch: StateMismatch
) -> None:
    """Ordinary floats convert into each other; anything else must be equal."""
    if model != source and not {model, source} <= CASTABLE:
        mismatch.differing.append(f"{key} (model {model}, source {source}: never cast)")


def tie_difference(first: str, second: str) -> str:
    """The line for two names that are one tensor in the model and two in the source."""
    return f"{first} and {second} (one tied tensor in the model, different values in the source)"


def _with_native_name(key: str, name: str) -> str:
    return key if key == name else f"{key} (for {name})"


def _row_blocks(shape: torch.Size) -> list[Index]:
    if not shape:
        return [()]
    rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    rest = tuple(slice(0, size) for size in shape[1:])
    return [
        (slice(start, min(start + rows, shape[0])), *rest) for start in range(0, shape[0], rows)
    ]
