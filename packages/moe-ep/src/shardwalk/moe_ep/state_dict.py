"""Files with one tensor per expert, for models that hold their experts stacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwalk.parallelizer_core import StateDictAdapter, read_concatenated

Index = tuple[slice, ...]
ReadSlice = Callable[[str, Index], Tensor]

_STACKED = {
    "gate_up_proj": ("gate", "up"),
    "up_proj": ("up",),
    "down_proj": ("down",),
}


class PerExpertAdapter(StateDictAdapter):
    """A `state_dict_adapter` for the layout of most published models: a matrix per expert.

    The stacked ``<path>.experts.gate_up_proj`` [E, 2 I, H] of the model stands in the files as
    ``<path>.experts.<e>.gate_proj.weight`` and ``...up_proj.weight`` [I, H], ``down_proj``
    [E, H, I] as ``<path>.experts.<e>.down_proj.weight`` [H, I], and biases as ``.bias``. Every
    other tensor has one file tensor. Reading takes from the files the experts and rows that a rank
    holds, and nothing else; a file that lacks an expert, or has one too many, is refused by
    `materialize` with its name.

    Args:
        gate: the name of an expert's gate projection in the files.
        up: that of its up projection.
        down: that of its down projection.
        rename: from the name that the above gives to the key in the files, for all tensors.
        experts: what the modules with stacked weights are called in the model.

    Raises:
        ValueError: when two of the three names are the same.

    Example:
        ::

            model.state_dict_adapter = PerExpertAdapter(gate="w1", up="w3", down="w2")
    """

    def __init__(
        self,
        *,
        gate: str = "gate_proj",
        up: str = "up_proj",
        down: str = "down_proj",
        rename: Callable[[str], str] = str,
        experts: str = "experts",
    ) -> None:
        if len({gate, up, down}) < 3:
            raise ValueError(f"gate={gate!r}, up={up!r} and down={down!r} must be three names")
        self._projections = {"gate": gate, "up": up, "down": down}
        self._rename = rename
        self._experts = experts

    def file_shapes(self, name: str, shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """One key per expert and projection, each with its shape; else one key."""
        stack = self._stack(name, shape)
        if stack is None:
            return {self._rename(name): shape}
        part = (stack.rows, *shape[2:])
        return {key: part for expert in range(shape[0]) for key in stack.keys(expert)}

    def read(self, name: str, shape: Sequence[int], index: Index, read: ReadSlice) -> Tensor:
        """The block `index` of a stacked tensor, from the files of its experts only."""
        stack = self._stack(name, shape)
        if stack is None:
            return read(self._rename(name), index)
        experts = range(*index[0].indices(shape[0]))
        parts = [stack.read(expert, index[1:], read) for expert in experts]
        if parts:
            return torch.stack(parts)
        empty = tuple(slice(0, 0) for _ in shape[1:])
        sizes = [len(range(*each.indices(size))) for each, size in zip(index, shape, strict=True)]
        return stack.read(0, empty, read).new_empty(sizes)

    def to_file(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """The matrices of all experts, as views."""
        stack = self._stack(name, tensor.shape)
        if stack is None:
            return {self._rename(name): tensor}
        return {
            key: part
            for expert, whole in enumerate(tensor.unbind(0))
            for key, part in zip(stack.keys(expert), whole.split(stack.rows), strict=True)
        }

    def _stack(self, name: str, shape: Sequence[int]) -> _Stack | None:
        """How a native tensor is spread over files; None for one that is not stacked."""
        path, _, attribute = name.rpartition(".")
        weight = attribute.removesuffix("_bias")
        if path.rpartition(".")[2] != self._experts or weight not in _STACKED:
            return None
        projections = [self._projections[each] for each in _STACKED[weight]]
        return _Stack(
            path=path,
            projections=projections,
            kind="weight" if weight == attribute else "bias",
            rows=shape[1] // len(projections),
            rename=self._rename,
        )


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """A stacked tensor: for each expert, projections of `rows` rows on top of each other."""

    path: str
    projections: Sequence[str]
    kind: str
    rows: int
    rename: Callable[[str], str]

    def keys(self, expert: int) -> list[str]:
        return [
            self.rename(f"{self.path}.{expert}.{projection}.{self.kind}")
            for projection in self.projections
        ]

    def read(self, expert: int, index: Index, read: ReadSlice) -> Tensor:
        sizes = [self.rows] * len(self.projections)
        return read_concatenated(self.keys(expert), sizes, index, read)
