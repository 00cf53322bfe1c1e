"""Parameters that are DTensors in the model and plain tensors while their module runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

Forward = Callable[..., Any]


def distribute_parameter(module: nn.Module, name: str, mesh: DeviceMesh, cut: Placement) -> None:
    """Replace a parameter of `module` by its part on this rank; without it, do nothing.

    Every rank cuts its own copy, so nothing is communicated.

    Raises:
        ValueError: another style has cut it already.
    """
    old = getattr(module, name)
    if old is None:
        return
    if isinstance(old, DTensor):
        raise ValueError(
            f"{name} of a {type(module).__name__} is cut already; give the module one style that "
            f"cuts it, and none to the modules around it"
        )
    part = distribute_tensor(old.detach(), mesh, [cut], src_data_rank=None)
    new = nn.Parameter(part, requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    setattr(module, name, new)


@contextmanager
def shown(module: nn.Module, **values: object) -> Iterator[None]:
    """Let `module` see `values` as its attributes; parameters that they hide stay registered."""
    attributes = vars(module)
    hidden = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            attributes.pop(name, None)
        attributes.update(hidden)


def local_values(module: nn.Module, gradients: Mapping[str, Placement]) -> dict[str, Tensor]:
    """This rank's values of parameters, and how each one's gradient lies over the axis."""
    return {
        name: _local(getattr(module, name), placement)
        for name, placement in gradients.items()
        if getattr(module, name, None) is not None
    }


def _local(parameter: Tensor, gradient: Placement) -> Tensor:
    assert isinstance(parameter, DTensor), "distribute_parameter has seen to that"
    return parameter.to_local(grad_placements=[gradient])
