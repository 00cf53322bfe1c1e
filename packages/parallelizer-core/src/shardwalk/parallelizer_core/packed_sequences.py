"""Rows of one sequence each: attention need not look for several in a row.

Attention of transformers reads `position_ids` in every layer to find sequences packed into one row,
and waits for the device to do so. It does not where it gets none. Blocks that are given the rotary
factors beside the positions don't need the positions.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardwalk.parallelizer_core.layers import find_block_stacks
from shardwalk.parallelizer_core.parallel_state import class_of

_OPTION = "patch_is_packed_sequence=True"


def hide_positions(model: nn.Module) -> None:
    """Hide `position_ids` from the blocks of `model`, and refuse packed ones in its calls.

    A call raises ValueError for positions of several sequences in a row, and where blocks are given
    no `position_ids`, or no `position_embeddings` beside them.
    """
    model.register_forward_pre_hook(_refuse_packed, with_kwargs=True)
    for stack in find_block_stacks(model):
        for _, block in stack.blocks:
            block.register_forward_pre_hook(_hide, with_kwargs=True)


def _refuse_packed(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    given = inspect.signature(model.forward).bind_partial(*args).arguments
    positions = kwargs.get("position_ids", given.get("position_ids"))
    if isinstance(positions, Tensor) and _are_packed(positions):
        raise ValueError(
            f"{_OPTION} is for rows of one sequence each, and position_ids start again within a "
            f"row, as in packed sequences; use patch_is_packed_sequence=False"
        )


def _are_packed(positions: Tensor) -> bool:
    steps = torch.diff(positions, dim=-1)
    # A row of padding before its sequence repeats a position; only rows of one batch are packed.
    starts = steps != 1 if positions.numel() == positions.shape[-1] else steps < 0
    return bool(starts.any())


def _hide(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if "position_ids" not in kwargs or kwargs.get("position_embeddings") is None:
        given = ", ".join(kwargs) or "no keyword arguments"
        raise ValueError(
            f"{_OPTION} hides position_ids from blocks that get position_embeddings beside them, "
            f"and a {class_of(block).__name__} gets {given}; use patch_is_packed_sequence=False"
        )
    return args, {**kwargs, "position_ids": None}
