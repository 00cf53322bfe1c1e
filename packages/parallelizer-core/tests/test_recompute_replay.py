"""Values recorded in the forward of a checkpointed call, and given again in its recompute."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardwalk.parallelizer_core import is_recomputing, record_or_replay, replay_contexts
from shardwalk.parallelizer_core.recompute_replay import RecomputeMark


class Draws:
    """A decision that comes out otherwise each time: 1, 2, 3, ..."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> int:
        self.made += 1
        return self.made


def checkpointed(
    function: Callable[..., Tensor], *args: Any, context_fn: Any = replay_contexts
) -> Any:
    return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn)


def leaf() -> Tensor:
    return torch.linspace(0.1, 1.0, 5).requires_grad_()


def scaled(draws: Draws, key: str = "scale") -> Callable[[Tensor], Tensor]:
    """x * sin(draw * x): another draw in the recompute changes the gradient."""

    def function(x: Tensor) -> Tensor:
        draw = record_or_replay(key, draws)
        return x * (draw * x).sin()

    return function


def expected(draw: int) -> Tensor:
    x = leaf()
    (x * (draw * x).sin()).sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_recompute_gets_what_the_forward_decided() -> None:
    x, draws = leaf(), Draws()
    checkpointed(scaled(draws), x).sum().backward()
    assert draws.made == 1
    torch.testing.assert_close(x.grad, expected(1), rtol=0, atol=0)


def test_without_a_log_every_call_computes() -> None:
    draws = Draws()
    assert [record_or_replay("a", draws), record_or_replay("a", draws)] == [1, 2]
    assert not is_recomputing()


def test_each_call_has_a_log_of_its_own() -> None:
    """Two forwards before one backward, and the second backward of a kept graph."""
    x, draws = leaf(), Draws()
    first, second = checkpointed(scaled(draws), x), checkpointed(scaled(draws), x)
    loss = first.sum() + second.sum()
    loss.backward(retain_graph=True)
    torch.testing.assert_close(x.grad, expected(1) + expected(2))
    loss.backward()
    assert draws.made == 2
    torch.testing.assert_close(x.grad, 2 * (expected(1) + expected(2)))


def test_a_backward_in_another_thread_replays() -> None:
    x, draws = leaf(), Draws()
    loss = checkpointed(scaled(draws), x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert draws.made == 1
    torch.testing.assert_close(x.grad, expected(1), rtol=0, atol=0)


def test_another_thread_sees_nothing_of_a_recompute() -> None:
    """Such as one that runs a forward while the backward of another call is under way."""
    seen: list[tuple[bool, int]] = []
    draws = Draws()

    def look() -> None:
        seen.append((is_recomputing(), record_or_replay("scale", draws)))

    def function(x: Tensor) -> Tensor:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return scaled(draws)(x)

    x = leaf()
    checkpointed(function, x).sum().backward()
    assert seen == [(False, 1), (False, 3)]
    torch.testing.assert_close(x.grad, expected(2), rtol=0, atol=0)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("depth", [2, 3])
def test_nested_calls_take_the_decision_of_the_first_forward(early_stop: bool, depth: int) -> None:
    """An inner forward that runs inside an outer recompute replays the outer log."""
    draws, x = Draws(), leaf()

    def nest(level: int) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            draw = record_or_replay(f"before {level}", draws)
            x = x * (draw * x).sin()
            if level > 1:
                x = checkpointed(nest(level - 1), x)
            draw = record_or_replay(f"after {level}", draws)
            return x * (draw * x).cos()

        return function

    with set_checkpoint_early_stop(early_stop):
        checkpointed(nest(depth), x).sum().backward()
    assert draws.made == 2 * depth
    y = leaf()
    inner = y
    for draw in range(1, depth + 1):
        inner = inner * (draw * inner).sin()
    for draw in range(depth + 1, 2 * depth + 1):
        inner = inner * (draw * inner).cos()
    inner.sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)


def test_a_recompute_without_a_log_is_an_error() -> None:
    """Not a new decision: around an inner call with a log of its own, neither."""
    marked = lambda: (nullcontext(), RecomputeMark())  # noqa: E731
    for function in (scaled(Draws()), lambda x: checkpointed(scaled(Draws()), x * 2).sin()):
        loss = checkpointed(function, leaf(), context_fn=marked).sum()
        with pytest.raises(RuntimeError, match="'scale', which nothing recorded.*replay_contexts"):
            loss.backward()


def test_what_a_computation_decides_in_turn_is_part_of_its_value() -> None:
    draws, x = Draws(), leaf()

    def function(x: Tensor) -> Tensor:
        draw = record_or_replay("outer", lambda: 10 * record_or_replay("inner", draws))
        last = record_or_replay("last", draws)
        return x * (draw * x).sin() * last

    checkpointed(function, x).sum().backward()
    assert draws.made == 2
    torch.testing.assert_close(x.grad, 2 * expected(10), rtol=0, atol=0)


def paths(recompute: list[str], *, early_stop: bool) -> None:
    """The forward records a, b, c; the recompute asks for other keys."""
    x, runs = leaf(), []

    def function(x: Tensor) -> Tensor:
        keys = recompute if is_recomputing() else ["a", "b", "c"]
        runs.append(keys)
        for key in keys:
            record_or_replay(key, lambda: 1)
        return x.sin()

    with set_checkpoint_early_stop(early_stop):
        checkpointed(function, x).sum().backward()
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("recompute", "named"),
    [
        (["a", "c"], r"asks for 'c' where its forward recorded 'b' \(record 1\)"),
        (["a", "b", "c", "d"], r"asks for 'd', which its forward did not record after \['a', 'b'"),
        (["a"], r"ended without asking for \['b', 'c'\]"),
    ],
)
def test_another_path_in_the_recompute_is_an_error_that_names_the_keys(
    recompute: list[str], named: str
) -> None:
    with pytest.raises(RuntimeError, match=named):
        paths(recompute, early_stop=False)
    paths(["a", "b", "c"], early_stop=False)


def test_a_recompute_that_torch_ends_early_may_leave_records_unread() -> None:
    """A call by hand, where torch stops at the last saved tensor: `early_stop=False` is up to it.

    Blocks that `parallelize_model` checkpoints have it (test_checkpoint_seams).
    """
    x, draws, ends = leaf(), Draws(), []

    def function(x: Tensor) -> Tensor:
        y = scaled(draws)(x)
        record_or_replay("after the last saved tensor", draws)
        ends.append(is_recomputing())
        return y

    checkpointed(function, x).sum().backward()
    assert ends == [False]  # the recompute never came there
    torch.testing.assert_close(x.grad, expected(1), rtol=0, atol=0)


def test_an_error_inside_leaves_no_log_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        record_or_replay("a", lambda: 1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        checkpointed(fails, leaf())
    draws = Draws()

    def fails_later(x: Tensor) -> Tensor:
        record_or_replay("a", draws)
        if is_recomputing():
            raise KeyError("mine")
        return x.sin()

    with pytest.raises(KeyError, match="mine"):
        checkpointed(fails_later, leaf()).sum().backward()
    assert not is_recomputing()
    assert record_or_replay("b", draws) == 2


@dataclass(frozen=True)
class Layout:
    counts: Tensor
    names: tuple[str, ...]


def test_values_are_plain_data_and_tensors_that_need_no_gradient() -> None:
    x, found = leaf(), []

    def function(x: Tensor) -> Tensor:
        layout = record_or_replay(
            "layout", lambda: {"first": [Layout(x.detach().argsort(), ("a",))], "second": None}
        )
        found.append(layout)
        return x.sin()[layout["first"][0].counts]

    checkpointed(function, x).sum().backward()
    assert found[0] is found[1]

    def wrong(value: Callable[[Tensor], Any]) -> None:
        checkpointed(lambda x: record_or_replay("router", lambda: value(x)) and x.sin(), leaf())

    for value in (
        lambda x: x * 2,
        lambda x: {"a": [1, (x * 2,)]},
        lambda x: Layout(x * 2, ()),
    ):
        with pytest.raises(TypeError, match="'router' holds a tensor that requires grad"):
            wrong(value)
    wrong(lambda x: [(x * 2).detach(), 1])


def test_a_record_that_is_changed_in_place_is_noticed() -> None:
    def function(x: Tensor) -> Tensor:
        counts = record_or_replay("counts", lambda: torch.ones(5))
        y = x * counts.clone().sin()
        counts.add_(1)
        return y.sin()

    with pytest.raises(RuntimeError, match="'counts' was changed in place"):
        checkpointed(function, leaf()).sum().backward()


class Heavy:
    """A value that can be watched."""


def watched(x: Tensor, kept: list[weakref.ref[Heavy]]) -> Tensor:
    heavy = record_or_replay("heavy", Heavy)
    kept.append(weakref.ref(heavy))
    return x.sin()


def test_the_log_is_freed_with_the_graph() -> None:
    for through in ("drop", "backward", "no_grad", "frozen"):
        kept: list[weakref.ref[Heavy]] = []
        x = leaf().requires_grad_(through != "frozen")
        with torch.set_grad_enabled(through != "no_grad"):
            y = checkpointed(lambda x, kept=kept: watched(x, kept), x)
        gc.collect()
        assert (kept[0]() is not None) == (through in ("drop", "backward")), through
        if through == "backward":
            y.sum().backward()
        del y
        gc.collect()
        assert kept[0]() is None, through


def states() -> Iterator[bool]:
    """Whether it recomputes, around and inside a checkpointed call."""
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(is_recomputing())
        return checkpointed(inner, x.cos())

    def inner(x: Tensor) -> Tensor:
        seen.append(is_recomputing())
        return x.sin()

    with set_checkpoint_early_stop(False):
        y = checkpointed(function, leaf())
    seen.append(is_recomputing())
    y.sum().backward()
    yield from (*seen, is_recomputing())


def test_is_recomputing_is_true_in_recomputes_only() -> None:
    first, inner, between, *recomputes, after = states()
    assert [first, inner, between, after] == [False] * 4
    assert recomputes == [True] * 3  # the outer call, the inner one in it, the inner one
