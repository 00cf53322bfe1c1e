"""Counting the collectives that a piece of code issues, and the bytes that they move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from shardwalk.parallelizer_core._torch_compat import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NO_COLLECTIVE = ("wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd")
_OUTPUT_FIRST = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "reduce_scatter_",
    "alltoall_",
    "alltoall_base_",
)


class CountCollectives(TorchDispatchMode):
    """Counts collectives within its context, on this rank.

    Attributes:
        calls: number of calls by name, such as ``_allgather_base_`` or ``all_reduce``.
        bytes: bytes of this rank's input tensors by the same names.

    Example:
        ::

            with CountCollectives() as counted:
                model(batch).sum().backward()
            assert counted.calls["_reduce_scatter_base_"] == 5
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count the call if it is a collective, and carry it out."""
        namespace, name = func.__module__.rpartition(".")[2], func.__name__.partition(".")[0]
        if namespace in _NAMESPACES and name not in _NO_COLLECTIVE:
            self.calls[name] += 1
            self.bytes[name] += sum(t.numel() * t.element_size() for t in _inputs(name, args))
        return func(*args, **(kwargs or {}))


def _inputs(name: str, args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The tensors a rank sends: the second argument where the first one is the output."""
    yield from _tensors(args[1] if name in _OUTPUT_FIRST else args[0])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
