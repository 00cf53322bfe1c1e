"""Containers that a checkpointed call is given, and that it or a later call may write to.

Layers that share keys and values hand them on in a mapping. A recompute must find in it what its
forward found, not what a later layer has put there since, and must leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any


class ContainersOfForward(AbstractContextManager[None]):
    """While entered, mappings and lists among `values` hold what they held when this was made.

    What they hold is not copied. May be entered again and inside itself.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._containers = list(_containers(values))
        self._before = [_content(each) for each in self._containers]
        self._aside: list[list[Any]] = []

    def __enter__(self) -> None:
        self._aside.append([_content(each) for each in self._containers])
        self._show(self._before)

    def __exit__(self, *unused: object) -> None:
        self._show(self._aside.pop())

    def _show(self, contents: list[Any]) -> None:
        for container, content in zip(self._containers, contents, strict=True):
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in values if isinstance(value, MutableMapping | list))


def _content(container: Any) -> Any:
    return list(container) if isinstance(container, list) else dict(container)
