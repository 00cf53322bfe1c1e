"""Buffers outside the state dict, rebuilt as their module's constructor made them.

Sources, in this order: the module's own ``compute_buffers(device)``; its constructor, run again
with arguments found under their own names among its attributes; the model's initializers. What
none of them gives is an error: a buffer is never left as it happens to be.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwalk.parallelizer_core.model_tensors import ModelTensor
from shardwalk.parallelizer_core.module_initializers import ModuleInitializers, original_class

_SIMPLE = (bool, int, float, str, bytes, tuple, type(None), torch.dtype)
_PLACEMENT_ARGUMENTS = ("device", "dtype")


@runtime_checkable
class ComputesBuffers(Protocol):
    """A module that can say what its buffers hold.

    Define this where a constructor argument is not kept under its own name.
    """

    def compute_buffers(self, device: torch.device) -> Mapping[str, Tensor]:
        """The buffers of this module itself (not its children's), by name, as constructed."""
        ...


class _CannotRebuildError(Exception):
    """Why one source does not give the buffers of a module."""


def rebuild_buffers(
    entries: Sequence[ModelTensor], device: torch.device, initializers: ModuleInitializers
) -> list[Tensor]:
    """The values of the buffers on `device`, in full, one for each entry.

    Raises:
        ValueError: naming every buffer that nobody can rebuild, with the reason.
    """
    by_module: dict[int, list[ModelTensor]] = {}
    for entry in entries:
        by_module.setdefault(id(entry.places[0][0]), []).append(entry)
    values: dict[int, Tensor] = {}
    reasons: list[str] = []
    for group in by_module.values():
        try:
            values.update(_rebuild_group(group, device, initializers))
        except _CannotRebuildError as error:
            reasons.append(f"{', '.join(entry.name for entry in group)} ({error})")
    if reasons:
        raise ValueError(
            f"cannot rebuild what no checkpoint or init function fills: {'; '.join(reasons)}. "
            "Keep every constructor argument as an attribute of the same name, or define "
            "compute_buffers(device) on the module"
        )
    return [values[id(entry)] for entry in entries]


def _rebuild_group(
    group: Sequence[ModelTensor], device: torch.device, initializers: ModuleInitializers
) -> dict[int, Tensor]:
    """The values of some buffers of one module, from the first source that has them all."""
    module = group[0].places[0][0]
    attributes = [entry.places[0][1] for entry in group]
    sources: list[Callable[[], Mapping[str, Tensor]]]
    if isinstance(module, ComputesBuffers):
        sources = [lambda: module.compute_buffers(device)]
    else:
        sources = [
            lambda: _from_constructor(module, attributes, device),
            lambda: _from_initializers(module, attributes, initializers),
        ]
    reasons = []
    for source in sources:
        try:
            found = source()
            return {
                id(entry): _checked(entry, found, attribute).to(device)
                for entry, attribute in zip(group, attributes, strict=True)
            }
        except _CannotRebuildError as error:
            reasons.append(str(error))
    raise _CannotRebuildError(", and ".join(filter(None, reasons)))


def _checked(entry: ModelTensor, found: Mapping[str, Tensor], attribute: str) -> Tensor:
    value = found.get(attribute)
    if not isinstance(value, Tensor):
        raise _CannotRebuildError(f"rebuilding gave no {attribute!r}")
    if value.is_meta:
        raise _CannotRebuildError(f"rebuilding left {attribute!r} on meta")
    if value.shape != entry.tensor.shape:
        raise _CannotRebuildError(
            f"rebuilding gave {attribute!r} the shape {list(value.shape)} instead of "
            f"{list(entry.tensor.shape)}"
        )
    return value.detach()


def _from_initializers(
    module: nn.Module, attributes: Sequence[str], initializers: ModuleInitializers
) -> Mapping[str, Tensor]:
    known = [name for name in attributes if initializers.knows(module, name)]
    if known != list(attributes):
        raise _CannotRebuildError("")
    return initializers.values(module, attributes)


def _from_constructor(
    module: nn.Module, attributes: Sequence[str], device: torch.device
) -> Mapping[str, Tensor]:
    arguments = _recovered_arguments(module, device)
    try:
        rebuilt = _construct(module, arguments, device, empty_on_meta=True)
        if not any(tensor.is_meta for tensor in _tensors(rebuilt, attributes).values()):
            return _verified(module, rebuilt, arguments, attributes)
    except (NotImplementedError, RuntimeError):
        pass  # the constructor computes with tensors that were kept on meta
    try:
        rebuilt = _construct(module, arguments, device, empty_on_meta=False)
    except Exception as error:
        raise _CannotRebuildError(f"its constructor raised {error!r}") from error
    return _verified(module, rebuilt, arguments, attributes)


def _verified(
    module: nn.Module,
    rebuilt: nn.Module,
    arguments: inspect.BoundArguments,
    attributes: Sequence[str],
) -> Mapping[str, Tensor]:
    """Its buffers, if the attributes that served as arguments came out as they went in."""
    for name, value in arguments.arguments.items():
        if name in _PLACEMENT_ARGUMENTS or not isinstance(value, _SIMPLE):
            continue
        again = vars(rebuilt).get(name)
        if type(again) is not type(value) or again != value:
            raise _CannotRebuildError(
                f"its constructor turns {name}={value!r} into {again!r}, so the attribute "
                f"{name!r} is not the argument it was built with"
            )
    return _tensors(rebuilt, attributes)


def _tensors(module: nn.Module, attributes: Sequence[str]) -> dict[str, Tensor]:
    found = {name: getattr(module, name, None) for name in attributes}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _recovered_arguments(module: nn.Module, device: torch.device) -> inspect.BoundArguments:
    """The constructor's arguments, read from attributes of the same names."""
    signature = inspect.signature(original_class(module))
    attributes = vars(module)
    values: dict[str, Any] = {}
    absent = []
    for name, parameter in signature.parameters.items():
        if name == "device":
            values[name] = device
        elif parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            absent.append(f"*{name}")
        elif name in attributes:
            values[name] = attributes[name]
        elif name != "dtype":
            absent.append(name)
    if absent:
        raise _CannotRebuildError(
            f"no attribute of {original_class(module).__name__} holds its constructor's "
            f"{', '.join(absent)}"
        )
    return inspect.BoundArguments(signature, OrderedDict(values))


def _construct(
    module: nn.Module,
    arguments: inspect.BoundArguments,
    device: torch.device,
    *,
    empty_on_meta: bool,
) -> nn.Module:
    """Run the constructor on `device`, leaving the generators as they were.

    With `empty_on_meta` no memory is spent on parameters, which constructors make empty first.
    """
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    empties = _EmptyOnMeta() if empty_on_meta else nullcontext()
    with torch.random.fork_rng(devices, device_type=kind), torch.device(device), empties:
        return original_class(module)(*arguments.args, **arguments.kwargs)


class _EmptyOnMeta(TorchFunctionMode):
    """Keeps what is made without values on meta."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)
