"""`zero_grad` of a sharded model, which reaches the shards while whole copies stand in for them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwalk.parallelizer_core._torch_compat import drop_unreduced_gradients, sharded_parameters
from shardwalk.parallelizer_core.parallel_state import fsdp_units


def clear_shards_in_zero_grad(module: nn.Module) -> None:
    """Let `module.zero_grad()` clear what its units hold; a second call changes nothing.

    From a forward with gradients to its backward a unit may show gathered copies as its parameters.
    They have no gradients, and those of the shards would be added to.
    """
    if not isinstance(vars(module).get("zero_grad"), _ZeroGrad):
        vars(module)["zero_grad"] = _ZeroGrad(module)


def clear_shards_in_every_unit(model: nn.Module) -> None:
    """Do so for every unit of `model`, and for `model` itself where it holds units only."""
    units: list[nn.Module] = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for module in [model, *units] if units else []:
        clear_shards_in_zero_grad(module)


class _ZeroGrad:
    """The `zero_grad` of a module, and of the shards and unreduced gradients of its units."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._zero_grad: Callable[[bool], None] = module.zero_grad

    def __call__(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, as `torch.nn.Module.zero_grad` does."""
        self._zero_grad(set_to_none)
        for unit in fsdp_units(self._module):
            drop_unreduced_gradients(unit)
            for parameter in sharded_parameters(unit):
                _clear(parameter, set_to_none)


def _clear(parameter: Tensor, set_to_none: bool) -> None:
    if set_to_none or parameter.grad is None:
        parameter.grad = None
    else:
        parameter.grad.detach_().zero_()
