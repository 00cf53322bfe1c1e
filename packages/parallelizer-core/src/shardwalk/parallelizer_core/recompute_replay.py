"""Record in the forward, replay in the recompute: decisions of a checkpointed call that must hold.

A checkpointed call runs twice, and what it decides from random draws, from load counters or by
asking other ranks may come out otherwise the second time. `record_or_replay` decides once::

    layout = record_or_replay("layout", lambda: exchange_sizes(counts))

The log of one checkpointed call belongs to the pair of contexts that `replay_contexts` makes, and
so is freed with the call's graph. Only the pointer to the active logs is thread-local: autograd may
run the recompute in another thread than the forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch

from shardwalk.parallelizer_core._torch_compat import tensor_version

T = TypeVar("T")

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What `torch.utils.checkpoint` takes from a `context_fn`: around the forward, the recompute."""


def replay_contexts() -> ContextPair:
    """A new log for one checkpointed call: its recording and its replaying context.

    The second may be entered any number of times; each starts at the first record, and raises
    RuntimeError for a record that was not asked for when it ends. torch ends a recompute early, by
    an exception, unless `checkpoint` was called with `early_stop=False`; `parallelize_model` does
    so for blocks with a `checkpoint_context`.
    """
    log: list[_Record] = []
    return _LogContext(log, replays=False), _LogContext(log, replays=True)


def record_or_replay(key: str, compute: Callable[[], T]) -> T:
    """The value of `compute()`, called in the forward only; a recompute gets the recorded value.

    Outside of any log it just computes. Inside nested checkpointed calls the value is recorded for
    each of them.

    Args:
        key: names the value in errors; a recompute must ask for the keys in the forward's order.
        compute: gives plain data and tensors that need no gradient, which nobody changes later.

    Raises:
        TypeError: the value holds a tensor that requires grad, whose graph a replay would cut.
        RuntimeError: in a recompute, the next record has another key, or there is none; a recorded
            tensor was changed in place since.
    """
    recording: list[_Cursor] = []
    for cursor in reversed(_thread.cursors):
        if cursor.replays:
            value: T = cursor.next(key)
            break
        recording.append(cursor)
    else:
        _refuse_unrecorded(key)
        value = _outside_of_logs(compute)
    if recording:
        record = _record(key, value)
        for cursor in recording:
            cursor.log.append(record)
    return value


def is_recomputing() -> bool:
    """Whether this thread is inside a recompute, where counters must not count again."""
    return _thread.recomputes > 0


def is_deciding() -> bool:
    """Whether this thread is in a `compute` whose value is being recorded; no recompute runs it."""
    return _thread.deciding > 0


@contextmanager
def not_kept() -> Iterator[None]:
    """Selective checkpointing keeps nothing of what runs inside, and recomputes all of it.

    For code that writes in place to what would be kept. Without checkpointing it means nothing.
    """
    _thread.deciding += 1
    try:
        yield
    finally:
        _thread.deciding -= 1


class Together(AbstractContextManager[None]):
    """Several contexts as one, which may be entered as often as each of them may."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        self._contexts = contexts
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class RecomputeMark(AbstractContextManager[None]):
    """Makes `is_recomputing` true while it is entered; may be entered again and inside itself."""

    def __enter__(self) -> None:
        _thread.recomputes += 1

    def __exit__(self, *unused: object) -> None:
        _thread.recomputes -= 1


@dataclass(frozen=True)
class _Record:
    key: str
    value: Any
    versions: tuple[int, ...]


@dataclass
class _Cursor:
    """One entered context: a log, and how far it was read."""

    log: list[_Record]
    replays: bool
    position: int = 0

    def next(self, key: str) -> Any:
        if self.position == len(self.log):
            recorded = [record.key for record in self.log]
            raise RuntimeError(
                f"the recompute asks for {key!r}, which its forward did not record after "
                f"{recorded}; forward and recompute must take the same path"
            )
        record = self.log[self.position]
        if record.key != key:
            raise RuntimeError(
                f"the recompute asks for {key!r} where its forward recorded {record.key!r} "
                f"(record {self.position}); forward and recompute must take the same path"
            )
        if record.versions != _versions(record.value):
            raise RuntimeError(
                f"a tensor of {key!r} was changed in place after it was recorded; record a copy"
            )
        self.position += 1
        return record.value


class _Thread(threading.local):
    """What is entered on this thread, the outermost first."""

    def __init__(self) -> None:
        self.cursors: list[_Cursor] = []
        self.recomputes = 0
        self.deciding = 0


_thread = _Thread()


class _LogContext(AbstractContextManager[None]):
    def __init__(self, log: list[_Record], *, replays: bool) -> None:
        self._log, self._replays = log, replays

    def __enter__(self) -> None:
        _thread.cursors.append(_Cursor(self._log, self._replays))
        _thread.recomputes += self._replays

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        cursor = _thread.cursors.pop()
        _thread.recomputes -= self._replays
        # torch ends a recompute by an exception as soon as it has what the backward needs.
        unread = self._log[cursor.position :]
        if self._replays and unread and exc_type is None:
            raise RuntimeError(
                f"the recompute ended without asking for {[record.key for record in unread]}, "
                f"which its forward recorded; forward and recompute must take the same path"
            )


def _outside_of_logs(compute: Callable[[], T]) -> T:
    """Call `compute`; what it decides in turn is part of its value and needs no record."""
    entered, _thread.cursors = _thread.cursors, []
    _thread.deciding += bool(entered)
    try:
        return compute()
    finally:
        _thread.cursors = entered
        _thread.deciding -= bool(entered)


def _refuse_unrecorded(key: str) -> None:
    if is_recomputing():
        raise RuntimeError(
            f"the recompute asks for {key!r}, which nothing recorded: the checkpointed call has no "
            f"log; give its block, or a module in it, `checkpoint_context = replay_contexts`"
        )


def _record(key: str, value: Any) -> _Record:
    if any(tensor.requires_grad for tensor in _tensors(value)):
        raise TypeError(
            f"the value of {key!r} holds a tensor that requires grad, and a replay would cut its "
            f"graph; record what needs no gradient (indices, sizes), or a detached tensor"
        )
    return _Record(key, value, _versions(value))


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(tensor_version(tensor) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple | set | frozenset):
        for element in value:
            yield from _tensors(element)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, each.name) for each in fields(value)])
