"""Tensors in what modules are called with and return: lists, tuples, dicts, dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor in `values`, at any depth."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        else:
            yield from tensors_in(_parts(value))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` of each tensor in its place.

    A container in which nothing changes stays the same object: others may hold it, and write to it.
    """
    if isinstance(value, Tensor):
        return function(value)
    parts = list(_parts(value))
    made = [map_tensors(function, part) for part in parts]
    if all(new is old for new, old in zip(made, parts, strict=True)):
        return value
    if _is_dataclass(value):
        return replace(value, **dict(zip(_names(value), made, strict=True)))
    if isinstance(value, dict):
        return dict(zip(value, made, strict=True))
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)


def _parts(value: Any) -> Iterable[Any]:
    if _is_dataclass(value):
        return [getattr(value, name) for name in _names(value)]
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _names(value: Any) -> list[str]:
    return [field.name for field in fields(value) if field.init]
