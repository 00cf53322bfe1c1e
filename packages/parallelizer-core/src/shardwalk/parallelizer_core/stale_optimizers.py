"""An optimizer that would step what training does not reach says so at its first step.

It may hold parameters that sharding replaced, or such as came into the model too late for anybody
to reduce their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardwalk.parallelizer_core.late_parameters import refuse_late_parameters, remember_reduced

_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
_checked: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
_hook: list[Any] = []
_parallelized = 0


def remember_parameters(model: nn.Module) -> dict[str, ReferenceType[nn.Parameter]]:
    """The parameters by name, held weakly: sharding frees the whole ones as it goes."""
    return {name: ref(parameter) for name, parameter in model.named_parameters()}


def watch_optimizers(before: Mapping[str, ReferenceType[nn.Parameter]], model: nn.Module) -> None:
    """Make a step of an optimizer an error that would leave `model` as it is, or tear ranks apart.

    Each optimizer is checked once, and again when it got more parameters or a model was
    parallelized in between.

    Args:
        before: what `remember_parameters` gave before the model was parallelized.
        model: the parallelized model.
    """
    global _parallelized
    kept = {id(parameter) for parameter in model.parameters()}
    for name, reference in before.items():
        parameter = reference()
        if parameter is not None and id(parameter) not in kept:
            _replaced[parameter] = name
    remember_reduced(model)
    _parallelized += 1
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == (count, _parallelized):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    _refuse_replaced(optimizer, parameters)
    if refuse_late_parameters(parameters):
        _checked[optimizer] = count, _parallelized


def _refuse_replaced(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    names = [_replaced[parameter] for parameter in parameters if parameter in _replaced]
    if names:
        raise RuntimeError(
            f"this {type(optimizer).__name__} was built before parallelize_model, which replaced "
            f"{names[0]} and {len(names) - 1} more of its parameters: a step would change nothing; "
            f"build the optimizer afterwards"
        )
