"""How the names and layouts of checkpoint files relate to those of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwalk.parallelizer_core.parallel_state import unwrap_model

Index = tuple[slice, ...]
ReadSlice = Callable[[str, Index], Tensor]
"""``read(key, index)`` gives that block of the file tensor ``key``, read from disk just then."""


class StateDictAdapter(Protocol):
    """What a model's attribute ``state_dict_adapter`` must offer when its files differ from it.

    A native name is a name in the model's own state dict; a key is a name in the files. Everything
    is asked per native tensor and per block of it, so that a rank reads only what it holds, and
    export can go tensor by tensor. Slices have explicit starts and stops and no step.
    """

    def file_shapes(self, name: str, shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """The keys that together hold the native tensor `name`, with their shapes in the file."""
        ...

    def read(self, name: str, shape: Sequence[int], index: Index, read: ReadSlice) -> Tensor:
        """The block `index` of the native tensor `name`, made of blocks of the files."""
        ...

    def to_file(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """The file tensors that hold the full native tensor `tensor`, which is not to be changed.

        Keys and shapes are those of `file_shapes`; the dtype may be another one.
        """
        ...


class RenamingAdapter:
    """Files that hold the same tensors under other names.

    Args:
        rename: from native name to key; each key must come from one native name.
    """

    def __init__(self, rename: Callable[[str], str]) -> None:
        self._rename = rename

    def file_shapes(self, name: str, shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """One key of the same shape."""
        return {self._rename(name): shape}

    def read(self, name: str, shape: Sequence[int], index: Index, read: ReadSlice) -> Tensor:
        """The same block of the renamed tensor."""
        return read(self._rename(name), index)

    def to_file(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """The tensor under its key."""
        return {self._rename(name): tensor}


def adapter_of(models: Sequence[nn.Module]) -> StateDictAdapter:
    """The adapter that the models have, or that of files with the model's own names."""
    for model in models:
        adapter: StateDictAdapter | None = getattr(unwrap_model(model), "state_dict_adapter", None)
        if adapter is not None:
            return adapter
    return SAME_NAMES


SAME_NAMES = RenamingAdapter(lambda name: name)
"""The adapter of a model without one: files hold its state dict as it is."""


def read_concatenated(
    keys: Sequence[str], sizes: Sequence[int], index: Index, read: ReadSlice, *, dim: int = 0
) -> Tensor:
    """The block `index` of tensors that the model holds concatenated along `dim`.

    For adapters of fused weights (gate and up, or q, k and v, in one matrix): reads of each file
    tensor only the rows that the block covers.

    Args:
        keys: the file tensors in the order in which the model concatenates them.
        sizes: the size of each along `dim`.
        index: the block of the fused tensor.
        read: the reader an adapter is given.
        dim: the dimension of concatenation.
    """
    wanted, start, parts = index[dim], 0, []
    for key, size in zip(keys, sizes, strict=True):
        first, last = max(wanted.start, start), min(wanted.stop, start + size)
        if first < last:
            own = slice(first - start, last - start)
            parts.append(read(key, (*index[:dim], own, *index[dim + 1 :])))
        start += size
    if not parts:
        return read(keys[0], (*index[:dim], slice(0, 0), *index[dim + 1 :]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
