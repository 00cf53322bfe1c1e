"""A word of warning when expert loads pile up that should have moved the correction biases."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_STEPS = 3

_unused_steps: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_hook: list[Any] = []
_warned: list[bool] = []


def load_counted(gate: nn.Module) -> None:
    """Note that `gate` counted tokens; warn once when optimizers stepped it and no update came."""
    if not _hook:
        _hook.append(register_optimizer_step_post_hook(_after_step))
    if _unused_steps.setdefault(gate, 0) >= _STEPS and not _warned:
        _warned.append(True)
        warnings.warn(
            f"the expert loads of {_STEPS} optimizer steps and more wait for an update of the "
            f"correction biases; call attach_router_bias_update(model, optimizer) once, or "
            f"update_router_biases(model) after each step",
            UserWarning,
            stacklevel=2,
        )


def load_used(gate: nn.Module) -> None:
    """Note that the load of `gate` begins anew."""
    _unused_steps.pop(gate, None)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for gate, steps in list(_unused_steps.items()):
        if id(getattr(gate, "weight", None)) in stepped:
            _unused_steps[gate] = steps + 1
