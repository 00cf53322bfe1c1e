"""Lengths that torch's own sequence-parallel styles cannot split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.cuts import splits_sequence_like_torch


def refuse_uneven_sequences(
    model: nn.Module, plan: Mapping[str, tuple[ParallelStyle, ...]], tp_size: int
) -> None:
    """Let a call of `model` raise where torch's styles in `plan` would cut a sequence unevenly.

    They forget its global length, and ranks would exchange tensors of different sizes. The styles
    of shardwalk split any length.
    """
    if any(splits_sequence_like_torch(style) for styles in plan.values() for style in styles):
        model.register_forward_pre_hook(_check_length(tp_size), with_kwargs=True)


def _check_length(tp_size: int) -> Callable[..., None]:
    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim > 1:
                _refuse(value.shape[1])
                return

    def _refuse(length: int) -> None:
        if length % tp_size:
            raise ValueError(
                f"a sequence length of {length} does not divide by tp_size={tp_size}, and torch's "
                f"sequence-parallel styles in the plan need that; pad the batch, or use "
                f"shardwalk's styles (SequenceBoundary, RowParallel(sequence_parallel=True), "
                f"SplitInput), which split any length"
            )

    return check
