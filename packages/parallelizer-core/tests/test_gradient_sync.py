"""Accumulation over micro-batches: one communication, right sums, flags as before (B69)."""

from __future__ import annotations

import contextlib

import pytest
import state_toys as toys
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwalk.mesh import FSDP2Config, MeshContext
from shardwalk.parallelizer_core._torch_compat import sync_flags_of
from shardwalk.parallelizer_core.gradient_sync import no_sync, sync_gradients_on_last
from shardwalk.parallelizer_core.parallel_state import fsdp_units, record_mesh_context
from shardwalk.parallelizer_core.testing import run_on_ranks

MICRO_BATCHES = 3


def micro_batches(sharding: str) -> list[tuple[Tensor, Tensor]]:
    x, y = toys.my_rows(sharding, *toys.batch(rows=12))
    return list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True))


def backward_reductions(model: nn.Module, x: Tensor, y: Tensor) -> int:
    loss = toys.mean_loss(model, x, y) / MICRO_BATCHES
    with toys.Reductions() as reductions:
        loss.backward()
    return reductions.count


def one_big_batch() -> dict[str, Tensor]:
    model = toys.toy()
    toys.mean_loss(model, *toys.batch(rows=12)).backward()
    return toys.whole_gradients(model)


def accumulate(sharding: str, form: str, bf16: bool = False) -> tuple[dict[str, Tensor], list[int]]:
    options = {"mp_policy": toys.BF16} if bf16 else {}
    model = toys.SHARDINGS[sharding](toys.toy(), **options)
    counted = []
    batches = micro_batches(sharding)
    if form == "loop":
        batches = sync_gradients_on_last(model, iter(batches))  # type: ignore[assignment]
    for index, (x, y) in enumerate(batches):
        is_last = index == MICRO_BATCHES - 1
        held = no_sync(model, enabled=not is_last) if form == "with" else contextlib.nullcontext()
        with held:
            counted.append(backward_reductions(model, x, y))
    return toys.whole_gradients(model), counted


@pytest.mark.parametrize("form", ["with", "loop"])
@pytest.mark.parametrize(("sharding", "world"), [("fsdp", 2), ("hsdp", 4), ("fsdp_tp", 4)])
def test_reductions_only_on_the_last_micro_batch(sharding: str, world: int, form: str) -> None:
    """B69: the sum equals one big batch; nothing is reduced before the last micro-batch."""
    expected = one_big_batch()
    for gradients, counted in run_on_ranks(world, accumulate, sharding, form):
        reduces = {"fsdp": 3, "hsdp": 6, "fsdp_tp": 3}[sharding]
        extra = counted[0]  # what tensor parallelism communicates in every micro-batch
        assert counted == [extra, extra, extra + reduces]
        assert extra == 0 or sharding == "fsdp_tp"
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


def accumulate_ddp(form: str) -> tuple[dict[str, Tensor], list[bool]]:
    model = toys.ddp(toys.toy())
    equal = []
    batches = micro_batches("ddp")
    if form == "loop":
        batches = sync_gradients_on_last(model, batches)  # type: ignore[assignment]
    for index, (x, y) in enumerate(batches):
        skip = form == "with" and index < MICRO_BATCHES - 1
        with no_sync(model, enabled=skip):
            (toys.mean_loss(model, x, y) / MICRO_BATCHES).backward()
        mine = toys.whole_gradients(model)["head.weight"]
        theirs = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(theirs, mine)
        equal.append(torch.equal(*theirs))
    return toys.whole_gradients(model), equal


@pytest.mark.parametrize("form", ["with", "loop"])
def test_ddp_reduces_only_on_the_last_micro_batch(form: str) -> None:
    """B69 under DDP: gradients of the ranks differ until the last micro-batch."""
    expected = one_big_batch()
    for gradients, equal in run_on_ranks(2, accumulate_ddp, form):
        assert equal == [False, False, True]
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


def accumulate_static_graph() -> dict[str, Tensor]:
    model = toys.ddp(toys.toy(), static_graph=True)
    for _ in range(2):
        model.zero_grad()
        for x, y in sync_gradients_on_last(model, micro_batches("ddp")):
            (toys.mean_loss(model, x, y) / MICRO_BATCHES).backward()
    return toys.whole_gradients(model)


def test_a_static_graph_is_recorded_with_communication() -> None:
    """torch fails an internal assertion when the first backward of a static graph is not synced."""
    expected = one_big_batch()
    for gradients in run_on_ranks(2, accumulate_static_graph):
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


def test_bf16_accumulation() -> None:
    expected = one_big_batch()
    for gradients, _ in run_on_ranks(2, accumulate, "fsdp", "loop", bf16=True):
        for name, gradient in expected.items():
            assert gradients[name].dtype == torch.float32
            torch.testing.assert_close(gradients[name], gradient, rtol=0.05, atol=5e-3)


def flags(model: nn.Module) -> list[list[tuple[bool, bool]]]:
    return [sync_flags_of(unit) for unit in fsdp_units(model)]


def nested_flags() -> None:
    model = toys.hsdp(toys.toy())
    assert isinstance(model, FSDPModule)
    blocks = model.blocks
    blocks[0].set_requires_all_reduce(False)  # type: ignore[union-attr,index,operator]
    before = flags(model)
    assert sorted({flag for unit in before for flag in unit}) == [(True, False), (True, True)]
    off = [[(False, False)]] * len(before)
    with contextlib.suppress(KeyError), no_sync(model):
        assert flags(model) == off
        with no_sync([model]), no_sync(model, enabled=False):
            assert flags(model) == off
        assert flags(model) == off
        raise KeyError
    assert flags(model) == before
    for index in sync_gradients_on_last(model, range(3)):
        if index == 1:
            break
    assert flags(model) == before


def test_flags_are_as_before_after_exceptions_nesting_and_break() -> None:
    """B69: per unit and per switch, what was set before is what is set afterwards."""
    run_on_ranks(4, nested_flags)


def ddp_flags() -> None:
    model = toys.ddp(toys.toy())
    with contextlib.suppress(KeyError), no_sync(model):
        with no_sync(model):
            assert not model.require_backward_grad_sync
        assert not model.require_backward_grad_sync
        raise KeyError
    assert model.require_backward_grad_sync


def test_ddp_flags_are_as_before() -> None:
    run_on_ranks(2, ddp_flags)


def accumulate_undeferred() -> tuple[dict[str, Tensor], list[int]]:
    model = toys.fsdp(toys.toy())
    config = FSDP2Config(defer_fsdp_grad_sync=False)
    record_mesh_context(model, MeshContext(strategy_config=config))
    counted = []
    for x, y in sync_gradients_on_last(model, micro_batches("fsdp")):
        counted.append(backward_reductions(model, x, y))
    return toys.whole_gradients(model), counted


def test_without_deferring_every_micro_batch_reduces() -> None:
    """``defer_fsdp_grad_sync=False``: more traffic, the same numbers."""
    expected = one_big_batch()
    for gradients, counted in run_on_ranks(2, accumulate_undeferred):
        assert counted == [3, 3, 3]
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_any_number_of_micro_batches(count: int) -> None:
    items = list(range(count))
    assert list(sync_gradients_on_last(nn.Linear(2, 2), iter(items))) == items


def abandon(model: nn.Module, sharding: str, how: str) -> None:
    """Begin an accumulation and leave it in one of the ways there are."""
    batches = micro_batches(sharding)
    if how == "no_sync":
        with contextlib.suppress(KeyError), no_sync(model):
            toys.mean_loss(model, *batches[0]).backward()
            raise KeyError
        return
    with contextlib.suppress(KeyError):
        for index, (x, y) in enumerate(sync_gradients_on_last(model, batches)):
            if how == "exception in the last" and index == MICRO_BATCHES - 1:
                raise KeyError
            toys.mean_loss(model, x, y).backward()
            if how == "break":
                break


def step_after(sharding: str, how: str, bf16: bool) -> dict[str, Tensor]:
    model = toys.SHARDINGS[sharding](toys.toy(), **({"mp_policy": toys.BF16} if bf16 else {}))
    if how == "partly reduced":
        for unit in fsdp_units(model):
            unit.set_requires_all_reduce(False, recurse=False)
    if how != "nothing":
        abandon(model, sharding, "break" if how == "partly reduced" else how)
    if how == "partly reduced":
        toys.mean_loss(model, *micro_batches(sharding)[0]).backward()
        abandon(model, sharding, "break")
        for unit in fsdp_units(model):
            unit.set_requires_all_reduce(True, recurse=False)
    model.zero_grad()
    toys.mean_loss(model, *micro_batches(sharding)[2]).backward()
    return toys.whole_gradients(model)


@pytest.mark.parametrize(
    ("sharding", "world", "bf16"),
    [("fsdp", 2, False), ("fsdp", 2, True), ("ddp", 2, False), ("hsdp", 4, False)],
)
def test_an_abandoned_accumulation_leaves_nothing_behind(
    sharding: str, world: int, bf16: bool
) -> None:
    """The step after a break or an exception has the gradients of its own micro-batch alone."""
    ways = ["break", "exception in the last", "no_sync"]
    ways += ["partly reduced"] if sharding == "hsdp" else []
    expected = run_on_ranks(world, step_after, sharding, "nothing", bf16)[0]
    for how in ways:
        for gradients in run_on_ranks(world, step_after, sharding, how, bf16):
            for name, gradient in expected.items():
                assert torch.equal(gradients[name], gradient), (how, name)


def test_enabled_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="enabled must be True or False, got 'no'"):
        no_sync(nn.Linear(2, 2), enabled="no").__enter__()  # type: ignore[arg-type]
