"""Accumulation that communicates every time, or leaves its switches changed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwalk.parallelizer_core import no_sync, sync_gradients_on_last
from shardwalk.parallelizer_core.testing import run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives
from tests.matrix.case_models import (
    BF16,
    assert_equal,
    gradients,
    mean_loss,
    mine,
    parallel,
    seeded,
    tokens,
)
from tests.matrix.test_case_clipping import Mixture
from tests.matrix.tiny_transformers import MODELS

SHARDINGS = [("fsdp", 1), ("fsdp", 2), ("hsdp", 4), ("ddp", 2)]
MICRO_BATCHES = 3


def llama() -> nn.Module:
    return MODELS["llama"](True)


class Untied(Mixture):
    """Plain parameters whose gradients a hook averages, beside units."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        self.unused = nn.Identity()


def switches(model: nn.Module) -> list[Any]:
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    flags = [flag for group in groups for flag in (group.reduce_grads, group.all_reduce_grads)]
    ddp = isinstance(model, DistributedDataParallel)
    return [*flags, model.require_backward_grad_sync if ddp else None]


def reductions(counted: CountCollectives) -> int:
    return sum(calls for name, calls in counted.calls.items() if "reduce" in name)


def accumulated(make: Any, kind: str, form: str) -> Any:
    model = parallel(seeded(make), kind)
    before = switches(model)
    batches = list(mine(tokens(rows=12)).split(12 // MICRO_BATCHES // dist.get_world_size()))
    assert len(batches) == MICRO_BATCHES
    counted, equal = [], []
    iterated = sync_gradients_on_last(model, batches) if form == "loop" else batches
    for index, batch in enumerate(iterated):
        held = form == "with" and index < MICRO_BATCHES - 1
        outer = no_sync(model) if held else contextlib.nullcontext()
        with outer, no_sync(model, enabled=held):  # nested on purpose
            loss = mean_loss(model, batch) / MICRO_BATCHES
            with CountCollectives() as counts:
                loss.backward()
        counted.append(reductions(counts))
        equal.append(same_everywhere(model) if kind == "ddp" else None)
    return gradients(model), counted, equal, switches(model) == before


def same_everywhere(model: nn.Module) -> bool:
    grad = next(model.parameters()).grad
    assert grad is not None
    peers = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(peers, grad)
    return all(torch.equal(grad, peer) for peer in peers)


@pytest.mark.parametrize("form", ["with", "loop"])
@pytest.mark.parametrize(("kind", "world"), SHARDINGS)
@pytest.mark.parametrize("make", [llama, Untied])
def test_three_micro_batches_reduce_once(make: Any, kind: str, world: int, form: str) -> None:
    """B69: scatters and all-reduces on the last one only; the sum is that of one big batch."""
    reference = seeded(make)
    mean_loss(reference, tokens(rows=12)).backward()
    for found, counted, equal, restored in run_on_ranks(world, accumulated, make, kind, form):
        assert_equal(found, gradients(reference))
        assert counted[:2] == [0, 0]
        assert restored
        if kind == "ddp":
            assert equal == [False, False, True]
        elif world > 1:
            assert counted[2] > 0


def flags_after(kind: str) -> list[list[Any]]:
    """The switches after an exception, after nesting, and after leaving a loop early."""
    model = parallel(seeded(llama), kind)
    if kind != "ddp":
        model.set_requires_gradient_sync(False, recurse=False)  # the user's own choice stays
    seen = [switches(model)]
    with contextlib.suppress(KeyError), no_sync(model):
        mean_loss(model, mine(tokens())).backward()
        with no_sync(model):
            pass
        inside = switches(model)
        raise KeyError
    seen.append(switches(model))
    for _ in sync_gradients_on_last(model, iter(range(3))):
        break
    seen.append(switches(model))
    with contextlib.suppress(KeyError):
        for _ in sync_gradients_on_last(model, range(3)):
            raise KeyError
    seen.append(switches(model))
    assert inside != seen[0] or not any(inside)
    return seen


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4), ("ddp", 2)])
def test_switches_are_as_before(kind: str, world: int) -> None:
    """B69: after an exception, nested use, an early end, on top of what the user had set."""
    for before, *later in run_on_ranks(world, flags_after, kind):
        assert all(flags == before for flags in later)


def narrow(kind: str) -> tuple[dict[str, Tensor | None], list[bool]]:
    model = parallel(seeded(llama), kind, mp_policy=BF16)
    for batch in sync_gradients_on_last(model, mine(tokens(rows=12)).split(1)):
        (mean_loss(model, batch) / (12 / dist.get_world_size())).backward()
    return gradients(model), [p.grad.dtype == torch.float32 for p in model.parameters()]


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4)])
def test_micro_batches_are_added_up_in_the_dtype_of_the_reduction(kind: str, world: int) -> None:
    """B69 in bf16: twelve micro-batches of one row lose no more than one of them does."""
    reference = seeded(llama)
    mean_loss(reference, tokens(rows=12)).backward()
    for found, wide in run_on_ranks(world, narrow, kind):
        assert all(wide)
        assert_equal(found, gradients(reference), tolerance=0.05)
