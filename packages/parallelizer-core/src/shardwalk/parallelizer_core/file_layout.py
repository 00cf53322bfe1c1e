"""Which tensors go into which files, decided before any is there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwalk.parallelizer_core.checkpoint_source import CASTABLE
from shardwalk.parallelizer_core.gathering import Gathered, HeldTensor
from shardwalk.parallelizer_core.safetensors_writing import DTYPE_NAMES, Shapes
from shardwalk.parallelizer_core.state_dict_adapter import StateDictAdapter


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """What the files will hold, and in which order it comes.

    Attributes:
        items: the native tensors, widest dtype first (so that every tensor of a file lies at a
            multiple of its element size), then in the order of the model.
        files: per file, the shapes of its tensors by key, in the order of the items.
        adapter: makes file tensors of native ones.
        dtype: what ordinary floats that are not pinned are cast to; None leaves them.
    """

    items: Sequence[Gathered]
    files: Sequence[Shapes]
    adapter: StateDictAdapter
    dtype: torch.dtype | None

    def file_tensors(self, held: HeldTensor, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The file tensors of a native one, in the order of the files.

        Raises:
            ValueError: when the adapter gives other keys or shapes than it announced, or a dtype
                that no file can hold.
        """
        tensors = self.adapter.to_file(held.name, full)
        announced = _shapes(self.adapter, held)
        given = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        if given != announced:
            raise ValueError(
                f"state_dict_adapter.to_file gave {given} for {held.name}, and file_shapes "
                f"announced {announced}; make the two agree"
            )
        for key in announced:
            if tensors[key].dtype not in DTYPE_NAMES:
                raise ValueError(
                    f"state_dict_adapter.to_file gave {key} in {tensors[key].dtype}, which "
                    f"safetensors lacks"
                )
            yield key, tensors[key]

    def stored_dtype(self, held: HeldTensor, dtype: torch.dtype) -> torch.dtype:
        """The dtype in the file of a tensor that came in that dtype from the adapter."""
        return _stored_dtype(self.dtype, held, dtype)

    @property
    def main_dtype(self) -> torch.dtype | None:
        """The ordinary float that most elements are stored in, by the dtypes of the model."""
        counts: Counter[torch.dtype] = Counter()
        for item in self.items:
            if item.held.dtype in CASTABLE:
                dtype = self.stored_dtype(item.held, item.held.dtype)
                counts[dtype] += math.prod(item.held.shape)
        return max(counts, key=lambda dtype: counts[dtype]) if counts else None


def file_layout(
    plan: Sequence[Gathered],
    adapter: StateDictAdapter,
    dtype: torch.dtype | None,
    max_file_size: int,
) -> FileLayout:
    """Lay out the files: each as full as the limit allows; a larger tensor has one of its own.

    Raises:
        ValueError: when two native tensors have one key.
    """
    _check_keys(plan, adapter)
    items = sorted(plan, key=lambda i: -_stored_dtype(dtype, i.held, i.held.dtype).itemsize)
    files: list[dict[str, Sequence[int]]] = [{}]
    room = max_file_size
    for item in items:
        width = _stored_dtype(dtype, item.held, item.held.dtype).itemsize
        for key, shape in _shapes(adapter, item.held).items():
            size = math.prod(shape) * width
            if size > room and files[-1]:
                files.append({})
                room = max_file_size
            files[-1][key] = shape
            room -= size
    return FileLayout(items=items, files=files, adapter=adapter, dtype=dtype)


def _check_keys(plan: Sequence[Gathered], adapter: StateDictAdapter) -> None:
    owners: dict[str, str] = {}
    for item in plan:
        for key in _shapes(adapter, item.held):
            other = owners.setdefault(key, item.held.name)
            if other != item.held.name:
                raise ValueError(
                    f"the state_dict_adapter gives {other} and {item.held.name} one key, {key!r}; "
                    f"give each native tensor keys of its own"
                )


def _shapes(adapter: StateDictAdapter, held: HeldTensor) -> Mapping[str, tuple[int, ...]]:
    shapes = adapter.file_shapes(held.name, held.shape)
    return {key: tuple(shape) for key, shape in shapes.items()}


def _stored_dtype(
    requested: torch.dtype | None, held: HeldTensor, dtype: torch.dtype
) -> torch.dtype:
    if requested is None or held.pinned or dtype not in CASTABLE:
        return dtype
    return requested
