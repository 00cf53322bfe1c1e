"""Wrappers around single layers, such as adapters, and the model as it is without them.

A plan names layers by the paths that they have without adapters, and reads their roles, widths and
sources. So it is made and checked on a model in which every wrapper has given its place to the
layer it wraps, and the wrappers come back right after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from shardwalk.parallelizer_core.wrapped_layers import (
    COPIES,
    LAYER,
    ORIGINAL,
    is_adapted,
    is_copied,
)


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """A layer that stands in a wrapper.

    Attributes:
        path: the wrapper's first path, which is the layer's in the model without wrappers.
        layer: what is wrapped.
        depth: how many wrappers stand around the layer.
        copies: modules of the same class which the wrapper may call instead of the layer, as it
            does where a whole layer is trained beside adapters; None for adapters, which add to it.
    """

    path: str
    wrapper: nn.Module
    layer: nn.Module
    depth: int = 1
    copies: tuple[nn.Module, ...] | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether the wrapper adds something to what its layer makes."""
        return self.copies is None


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[dict[str, Wrapped]]:
    """Let `model` hold wrapped layers in the place of their wrappers, which it gives by path."""
    places = list(_places(model))
    for parent, name, found in places:
        setattr(parent, name, found.layer)
    try:
        yield {found.path: found for _, _, found in places}
    finally:
        for parent, name, found in places:
            setattr(parent, name, found.wrapper)


def wrapped_at(path: str, wrapped: Mapping[str, Wrapped]) -> Wrapped | None:
    """The wrapper at `path` or around it."""
    inside = (w for place, w in wrapped.items() if path == place or path.startswith(f"{place}."))
    return next(inside, None)


def called_at(model: nn.Module, path: str, wrapped: Mapping[str, Wrapped]) -> list[nn.Module]:
    """The modules that the model calls where `path` leads to in it without wrappers.

    That is the wrapper of an adapted layer, and beside a wrapped layer every copy of it.
    """
    around = wrapped_at(path, wrapped)
    if around is not None and around.is_adapter and path == around.path:
        return [around.wrapper]
    modules = [model.get_submodule(path)]
    if around is not None and around.copies:
        inner = path.removeprefix(around.path).removeprefix(".")
        modules += [copy.get_submodule(inner) for copy in around.copies]
    return modules


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, Wrapped]]:
    """Every place of every outermost wrapper: the module that holds it, under which name."""
    found: dict[nn.Module, Wrapped] = {}
    for path, parent in model.named_modules():
        if any(path == w.path or path.startswith(f"{w.path}.") for w in found.values()):
            continue
        for name, child in parent.named_children():
            wrapped = found.get(child) or _wrapped(f"{path}.{name}" if path else name, child)
            if wrapped is not None:
                found[child] = wrapped
                yield parent, name, wrapped


def _wrapped(path: str, module: nn.Module) -> Wrapped | None:
    if is_adapted(module):
        layer, depth = module.get_submodule(LAYER), 1
        while is_adapted(layer):
            layer, depth = layer.get_submodule(LAYER), depth + 1
        return Wrapped(path=path, wrapper=module, layer=layer, depth=depth)
    if is_copied(module):
        copies = tuple(module.get_submodule(COPIES).children())
        layer = module.get_submodule(ORIGINAL)
        return Wrapped(path=path, wrapper=module, layer=layer, copies=copies)
    return None
