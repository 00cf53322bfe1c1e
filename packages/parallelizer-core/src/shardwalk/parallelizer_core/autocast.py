"""Mixed precision by autocast: the forward of the whole model runs under it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwalk.mesh import DDPConfig, FSDP2Config, MeshContext

_ALLOWED = (torch.bfloat16, torch.float16)


def autocast_dtype(mesh_context: MeshContext) -> torch.dtype | None:
    """The dtype that the strategy asks to autocast to.

    Raises:
        ValueError: torch would not autocast to it.
    """
    strategy = mesh_context.strategy_config
    if not isinstance(strategy, FSDP2Config | DDPConfig) or strategy.autocast_dtype is None:
        return None
    if strategy.autocast_dtype not in _ALLOWED:
        raise ValueError(
            f"autocast_dtype={strategy.autocast_dtype} is none that torch autocasts to; use "
            f"torch.bfloat16 or torch.float16, or None"
        )
    return strategy.autocast_dtype


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Run the forward of `model` under autocast, in place; a second call changes nothing."""
    if not isinstance(vars(model).get("forward"), AutocastForward):
        vars(model)["forward"] = AutocastForward(model, device_type, dtype)


class AutocastForward:
    """The forward of a model under autocast; recomputes in the backward find the same state."""

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        self._forward: Callable[..., Any] = model.forward
        functools.update_wrapper(self, self._forward, updated=())
        self._device_type, self._dtype = device_type, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward."""
        # A cache of cast weights would keep those that a unit has freed until the forward ends.
        with torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=False):
            return self._forward(*args, **kwargs)
