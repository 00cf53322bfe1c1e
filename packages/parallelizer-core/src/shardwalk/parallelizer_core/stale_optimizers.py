"""An optimizer that holds parameters which sharding replaced would step, and change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
_hook: list[Any] = []


def remember_parameters(model: nn.Module) -> dict[str, ReferenceType[nn.Parameter]]:
    """The parameters by name, held weakly: sharding frees the whole ones as it goes."""
    return {name: ref(parameter) for name, parameter in model.named_parameters()}


def forbid_steps_on_replaced(
    before: Mapping[str, ReferenceType[nn.Parameter]], model: nn.Module
) -> None:
    """Make a step of an optimizer that holds what `model` had `before`, and has no more, an error.

    Args:
        before: what `remember_parameters` gave before the model was parallelized.
        model: the parallelized model.
    """
    kept = {id(parameter) for parameter in model.parameters()}
    for name, reference in before.items():
        parameter = reference()
        if parameter is not None and id(parameter) not in kept:
            _replaced[parameter] = name
    if _replaced and not _hook:
        _hook.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    names = [
        _replaced[parameter]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in _replaced
    ]
    if names:
        raise RuntimeError(
            f"this {type(optimizer).__name__} was built before parallelize_model, which replaced "
            f"{names[0]} and {len(names) - 1} more of its parameters: a step would change nothing; "
            f"build the optimizer afterwards"
        )
