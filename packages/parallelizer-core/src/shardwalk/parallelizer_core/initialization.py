"""Initial weights whose values depend on the seed and the name, never on the mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwalk.parallelizer_core.model_tensors import (
    ModelTensor,
    local_index,
    local_part,
    write_full,
)

InitFunction = Callable[[str, Tensor, torch.Generator], object]
"""``init(fqn, tensor, generator)`` fills the tensor in place with numbers of the generator."""


def named_seed(seed: int, name: str) -> int:
    """A 63-bit seed that depends on both and on nothing else."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class FunctionSource:
    """Fills parameters by a function of the user, each drawn in full on the CPU.

    A module may name parameters in ``grouped_parameters``, such as the stacked weights of experts:
    these are drawn index by index along dim 0, and only the indices this rank holds.
    """

    def __init__(self, init: InitFunction, seed: int) -> None:
        self._init = init
        self._seed = seed

    def check(self, entries: Sequence[ModelTensor]) -> None:
        """Nothing to check before the function runs."""

    def fill(self, entries: Sequence[ModelTensor]) -> None:
        """Draw every tensor and keep this rank's part."""
        for entry in entries:
            if _is_grouped(entry):
                self._fill_group(entry)
            else:
                like = torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, device="meta")
                write_full(entry.tensor, self._draw(entry.name, entry.name, like))

    @torch.no_grad()
    def _fill_group(self, entry: ModelTensor) -> None:
        first, *rest = local_index(entry.tensor)
        local = local_part(entry.tensor)
        like = torch.empty(entry.tensor.shape[1:], dtype=entry.tensor.dtype, device="meta")
        for row, index in enumerate(range(first.start, first.stop)):
            full = self._draw(entry.name, f"{entry.name}[{index}]", like)
            local[row].copy_(full[tuple(rest)])

    def _draw(self, name: str, seed_name: str, like: Tensor) -> Tensor:
        full = unset_tensor(like)
        generator = torch.Generator(device="cpu").manual_seed(named_seed(self._seed, seed_name))
        with torch.no_grad():
            result = self._init(name, full, generator)
        if result is not None and result is not full:
            raise TypeError(
                f"init returned another tensor for {name!r}; it must fill its argument in place"
            )
        if has_unset_values(full):
            raise ValueError(f"init left values of {name!r} unset or NaN")
        return full


def unset_tensor(like: Tensor) -> Tensor:
    """A CPU tensor of the same shape and dtype, NaN where its dtype has NaN, else 0."""
    fill = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full(like.shape, fill, dtype=like.dtype, device="cpu")


def has_unset_values(tensor: Tensor) -> bool:
    """Whether some value was never written (or was written as NaN)."""
    return bool(tensor.isnan().any())


def _is_grouped(entry: ModelTensor) -> bool:
    module, attribute = entry.places[0]
    return attribute in getattr(module, "grouped_parameters", ())
