"""Carrying out a tensor-parallel plan on a model, with shared weights kept shared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shardwalk.parallelizer_core._torch_compat import own_output
from shardwalk.parallelizer_core.tensor_parallel.adapters import (
    Wrapped,
    called_at,
    without_wrappers,
    wrapped_at,
)
from shardwalk.parallelizer_core.tensor_parallel.lora import parallelize_adapted

Place = tuple[str, nn.Module, str]


def apply_plan(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, tuple[ParallelStyle, ...]]
) -> None:
    """Give every module that `plan` names its styles, in order; without communication.

    Args:
        model: changed in place; every rank holds the same weights, or none yet (meta).
        mesh: the tensor-parallel axis.
        plan: module path -> styles.

    Raises:
        ValueError: a weight that stands in two modules is cut in two ways.
    """
    ties = _shared_places(model)
    with without_wrappers(model) as wrapped:
        for path, styles in plan.items():
            for module in _styled(model, mesh, path, styles, wrapped):
                forward = vars(module).get("forward")
                if forward is not None and hasattr(forward, "place"):
                    forward.place = path  # for errors to name
                own_output(module)
    for places in ties:
        _tie_again(places)


def _styled(
    model: nn.Module,
    mesh: DeviceMesh,
    path: str,
    styles: tuple[ParallelStyle, ...],
    wrapped: dict[str, Wrapped],
) -> Iterator[nn.Module]:
    """Apply the styles of one path; gives the modules that have them, one after each style."""
    around = wrapped_at(path, wrapped)
    if around is not None and around.is_adapter and path == around.path:
        yield parallelize_adapted(around, mesh, styles)
        return
    for module in called_at(model, path, wrapped):
        for style in styles:
            yield parallelize_module(module, mesh, style, src_data_rank=None)


def _shared_places(model: nn.Module) -> list[list[Place]]:
    places: dict[int, list[Place]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append((path, module, name))
    return [group for group in places.values() if len(group) > 1]


def _tie_again(places: list[Place]) -> None:
    cuts = {_cut(getattr(module, name)) for _, module, name in places}
    if len(cuts) > 1:
        listed = ", ".join(
            f"{path}.{name}: {_cut(getattr(module, name))}" for path, module, name in places
        )
        raise ValueError(
            f"one weight stands in several modules, and the tensor-parallel plan cuts it in "
            f"different ways ({listed}); give these modules styles that agree"
        )
    _, first, first_name = places[0]
    for _, module, name in places[1:]:
        setattr(module, name, getattr(first, first_name))


def _cut(parameter: Tensor) -> str:
    return str(tuple(parameter.placements)) if isinstance(parameter, DTensor) else "whole"
