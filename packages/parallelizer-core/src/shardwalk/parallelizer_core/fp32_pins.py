"""Parameters that compute in fp32 whatever the precision policy says.

A model pins them with a list of names in `_keep_in_fp32_modules_strict` (the attribute transformers
reads), on the model or on any module in it. A name is one or more dotted path segments below that
module: `gate` pins every parameter in a module called gate, `mlp.gate.weight` one parameter of each
mlp. Wrappers on the way (activation checkpointing, adapters, copies of a layer that train in its
place) are no segments.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwalk.parallelizer_core.model_tensors import canonical_name
from shardwalk.parallelizer_core.parallel_state import class_of
from shardwalk.parallelizer_core.wrapped_layers import names_of_layers

PIN_ATTRIBUTE = "_keep_in_fp32_modules_strict"

_pinned: WeakIdKeyDictionary = WeakIdKeyDictionary()


def pin_fp32_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Mark every parameter that `model` pins to fp32, and return them by name.

    A pinned parameter or buffer on the meta device becomes fp32 (no value is lost there).

    Raises:
        ValueError: a pinned name matches nothing in its module (unless a base class pins it, for
            more models than this one), or real pinned weights are stored in a narrower dtype, so
            that their low bits are gone already.
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, owner in model.named_modules():
        for pin in _pins_of(owner):
            _check_pin(owner, pin)
            found.update(_matches(prefix, owner, pin))
    return _pin(found)


def pin_parameters_below(module: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Mark what stands below `names` in `module` as `pin_fp32_parameters` does, and return it.

    For the part of a model that a sidecar shards by itself; a name may match nothing there.

    Raises:
        ValueError: real weights are stored in a narrower dtype than float32.
    """
    return _pin({key: tensor for pin in names for key, tensor in _matches("", module, pin)})


def is_pinned(parameter: nn.Parameter) -> bool:
    """Whether a parameter is marked to compute in fp32."""
    return parameter in _pinned


def pinned_names(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Those of the canonical names of tensors that `model`, or a module in it, pins to fp32.

    For what only reads: nothing is marked or widened, and a pin that matches nothing is no error.
    """
    plain = names_of_layers(model)
    pins = {
        (plain(prefix), canonical_name(pin))
        for prefix, owner in model.named_modules()
        for pin in _pins_of(owner)
    }
    return {name for name in names for prefix, pin in pins if _is_below(plain(name), prefix, pin)}


def _is_below(name: str, prefix: str, pin: str) -> bool:
    inside = f".{name}".removeprefix(f".{prefix}." if prefix else ".")
    return inside != f".{name}" and _has_segments(inside, pin)


def _pins_of(module: nn.Module) -> Iterator[str]:
    # A wrapper passes the attribute of what it holds on, which is a module of its own here.
    if inspect.getattr_static(module, PIN_ATTRIBUTE, None) is None:
        return iter(())
    names = getattr(module, PIN_ATTRIBUTE, None)
    return iter((names,) if isinstance(names, str) else names or ())


def _pin(found: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    for name, tensor in found.items():
        _widen(name, tensor)
    parameters = {n: tensor for n, tensor in found.items() if isinstance(tensor, nn.Parameter)}
    for parameter in parameters.values():
        _pinned[parameter] = True
    return parameters


def _matches(prefix: str, owner: nn.Module, pin: str) -> Iterator[tuple[str, torch.Tensor]]:
    dot = f"{prefix}." if prefix else ""
    plain = names_of_layers(owner)
    for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
        if _has_segments(plain(name), pin) and tensor.is_floating_point():
            yield f"{dot}{name}", tensor


def _check_pin(owner: nn.Module, pin: str) -> None:
    if not _names_something(owner, pin) and not _is_inherited(owner, pin):
        raise ValueError(
            f"{PIN_ATTRIBUTE} of {type(owner).__name__} pins {pin!r}, which names no module, "
            f"parameter or buffer in it; correct the name, or remove it from the list of this model"
        )


def _is_inherited(owner: nn.Module, pin: str) -> bool:
    """Whether a base class pins the name, for all its models and so for parts that lack it."""
    _, *bases = class_of(owner).__mro__
    lists = (vars(base).get(PIN_ATTRIBUTE) or () for base in bases)
    return any(pin == names if isinstance(names, str) else pin in names for names in lists)


def _names_something(owner: nn.Module, pin: str) -> bool:
    names = [name for name, _ in owner.named_modules()]
    names += [name for name, _ in owner.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in owner.named_buffers(remove_duplicate=False)]
    plain = names_of_layers(owner)
    return any(_has_segments(plain(name), pin) for name in names)


def _has_segments(name: str, pin: str) -> bool:
    return f".{pin}." in f".{canonical_name(name)}."


def _widen(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype in (torch.float32, torch.float64):
        return
    if not tensor.is_meta:
        raise ValueError(
            f"{name} is pinned to float32 ({PIN_ATTRIBUTE}) but stored in {tensor.dtype}: its "
            f"low bits are lost; build the model in float32 or load it on the meta device, or call "
            f".float() on that module"
        )
    tensor.data = tensor.data.float()
