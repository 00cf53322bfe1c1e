"""Tokens exchanged over ranks give the numbers of one rank that has them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_dispatch_toys import HIDDEN, Exchanges, block, inputs, loss_of, run, scales, through
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from shardwalk.moe_ep.dispatcher import AllToAllDispatcher, LocalDispatcher
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

EXPERTS = 8

EVEN, UNEVEN, ONE, EMPTY = (6, 6, 6, 6), (5, 0, 9, 1), (0, 1, 0, 0), (0, 0, 0, 0)


def routed(kind: str, tokens: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, experts, weights = inputs(tokens, top_k, EXPERTS, dtype=dtype)
    if kind == "first rank":
        experts = experts % 2  # experts 0 and 1, even one of them twice
    elif kind == "last expert":
        experts = torch.full_like(experts, EXPERTS - 1)
    elif kind == "some dropped":
        experts = experts.masked_fill(torch.rand(experts.shape) < 0.5, -1)
    elif kind == "all dropped":
        experts = torch.full_like(experts, -1)
    else:
        assert kind == "random"
    return x, experts, weights


def share(tensor: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
    return tensor.split(list(sizes))[rank]


def leaf(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(like.requires_grad)


def compare(
    sizes: Sequence[int],
    kind: str,
    top_k: int,
    dtype: torch.dtype = torch.float32,
    frozen: str = "",
    group: Any = None,
) -> None:
    """This rank's tokens through its peers, and all tokens on this rank alone."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(3)
    sizes = sizes[:world]
    x, experts, weights = routed(kind, sum(sizes), top_k, dtype)
    for name, each in (("x", x), ("weights", weights)):
        each.requires_grad_(name not in frozen.split())
    scale = scales(EXPERTS, dtype=dtype)
    whole = run(
        lambda x, weights, scale: through(LocalDispatcher(EXPERTS), x, experts, weights, scale),
        x,
        weights,
        scale,
    )
    expected = [share(each, sizes, rank) for each in whole[:-1]]
    expected.append(whole[-1].chunk(world)[rank])
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD if group is None else group)
    here = share(experts, sizes, rank)
    found = run(
        lambda x, weights, scale: through(dispatcher, x, here, weights, scale),
        leaf(share(x, sizes, rank), x),
        leaf(share(weights, sizes, rank), weights),
        block(scale, group),
    )
    tolerance = 1e-6 if dtype == torch.float32 else 3e-2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "kind", ["random", "first rank", "last expert", "some dropped", "all dropped"]
)
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, ONE, EMPTY])
def test_sums_and_gradients_are_those_of_one_rank(
    world_size: int, kind: str, sizes: Sequence[int]
) -> None:
    run_on_ranks(world_size, compare, sizes, kind, 3)


@pytest.mark.parametrize("top_k", [1, 8])
def test_one_expert_for_each_token_and_all_of_them(top_k: int) -> None:
    run_on_ranks(4, compare, UNEVEN, "random", top_k)


@pytest.mark.parametrize("kind", ["random", "some dropped", "first rank"])
def test_bf16_rows(kind: str) -> None:
    run_on_ranks(4, compare, UNEVEN, kind, 4, torch.bfloat16)


@pytest.mark.parametrize("frozen", ["x", "weights", "x weights"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    """A frozen router, or tokens of frozen layers; the experts get theirs all the same."""
    run_on_ranks(2, compare, EVEN, "random", 3, torch.float32, frozen)


def outputs_kept_for(frozen: bool) -> bool:
    """Whether combine keeps the outputs of experts, which only weights' gradients need."""
    x, experts, weights = inputs(5, 2, EXPERTS)
    weights.requires_grad_(not frozen)
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    rows, metadata = dispatcher.dispatch(x, experts, weights)
    outputs, kept = rows * block(scales(EXPERTS))[0], []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with saved_tensors_hooks(keep, lambda saved: saved):
        dispatcher.combine(outputs, metadata)
    return any(saved is outputs for saved in kept)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_router_keeps_no_outputs(frozen: bool) -> None:
    assert run_on_ranks(2, outputs_kept_for, frozen) == [not frozen] * 2


def with_uninitialized_memory_full_of_nan() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        compare(UNEVEN, "some dropped", 3)
        compare(UNEVEN, "random", 3, torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_uninitialized_is_read() -> None:
    run_on_ranks(4, with_uninitialized_memory_full_of_nan)


def in_part_of_the_world(as_mesh: bool) -> None:
    mesh = cached("ep", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "ep")))
    group = mesh["ep"].get_group()
    compare(EVEN, "random", 3, group=group)
    if as_mesh:
        dispatcher = AllToAllDispatcher(EXPERTS, mesh["ep"])
        x, experts, weights = inputs(dist.get_rank() + 1, 2, EXPERTS)
        assert (
            through(dispatcher, x, experts, weights, block(scales(EXPERTS), group)).shape == x.shape
        )
        with pytest.raises(ValueError, match=r"mesh of one axis, not of \('ep_shard', 'ep'\)"):
            AllToAllDispatcher(EXPERTS, mesh)


@pytest.mark.parametrize("as_mesh", [False, True])
def test_experts_over_a_part_of_the_world(as_mesh: bool) -> None:
    run_on_ranks(4, in_part_of_the_world, as_mesh)


def alone() -> None:
    groups = cached("alone", lambda: [dist.new_group([rank]) for rank in range(2)])
    group = groups[dist.get_rank()]
    with pytest.raises(ValueError, match="this rank is not one of the expert-parallel group"):
        AllToAllDispatcher(EXPERTS, groups[1 - dist.get_rank()])
    with Exchanges() as counted:
        compare(EVEN, "some dropped", 3, group=group)
    assert not counted.calls


def test_a_group_of_one_rank_exchanges_nothing() -> None:
    run_on_ranks(2, alone)


def two_calls_before_a_combine() -> None:
    """Metadata belongs to its call, and a dispatcher keeps nothing."""
    torch.manual_seed(dist.get_rank())
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    calls = [inputs(tokens, 2, EXPERTS) for tokens in (4, 7)]
    scale = block(scales(EXPERTS))
    apart = [through(dispatcher, *call, scale) for call in calls]
    dispatched = [dispatcher.dispatch(*call) for call in calls]
    for (rows, metadata), expected in reversed(list(zip(dispatched, apart, strict=True))):
        pieces = rows.split(metadata.counts)
        outputs = torch.cat([(p * s).sin() for p, s in zip(pieces, scale, strict=True)])
        torch.testing.assert_close(dispatcher.combine(outputs, metadata), expected, rtol=0, atol=0)


def test_metadata_belongs_to_its_call() -> None:
    run_on_ranks(2, two_calls_before_a_combine)


def a_step(kind: str, dtype: torch.dtype) -> list[float]:
    """Loss, then AdamW on experts that may have got nothing; the norm over all ranks."""
    torch.manual_seed(dist.get_rank())
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    x, experts, weights = routed(kind, 5, 3, dtype)
    scale = block(scales(EXPERTS, dtype=dtype))
    optimizer = torch.optim.AdamW([scale])
    loss_of(through(dispatcher, x, experts, weights, scale)).backward()
    for each in (x, weights, scale):
        assert each.grad is not None
        assert each.grad.isfinite().all()
    assert scale.grad is not None
    if kind == "first rank" and dist.get_rank() > 0:
        assert not scale.grad.any()
    norm = scale.grad.float().square().sum()
    dist.all_reduce(norm)
    optimizer.step()
    return [norm.item(), float(scale.isfinite().all())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["first rank", "last expert"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_b47_ranks_whose_experts_get_no_tokens_take_part(
    world_size: int, kind: str, dtype: torch.dtype
) -> None:
    """Nothing hangs, their gradients are zeros, and every rank sees the same norm."""
    reports = run_on_ranks(world_size, a_step, kind, dtype)
    assert all(report == reports[0] and report[1] for report in reports)


def with_an_expert_that_is_not() -> str:
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    x, experts, weights = inputs(4, 2, EXPERTS)
    if dist.get_rank() == 1:
        experts[2, 1] = EXPERTS
    with pytest.raises(ValueError) as caught:
        dispatcher.dispatch(x, experts, weights)
    return str(caught.value)


def test_an_expert_that_there_is_not_is_refused_on_every_rank() -> None:
    messages = run_on_ranks(2, with_an_expert_that_is_not)
    assert messages[0] == messages[1]
    assert "numbers of 8 and more" in messages[0]
    assert "slots by rank: [0, 1]" in messages[0]


def refuse() -> None:
    with pytest.raises(
        ValueError, match=r"ep_size=2 does not divide num_experts=7; use one of \[1, 7\]"
    ):
        AllToAllDispatcher(7, dist.group.WORLD)
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    x, experts, weights = inputs(4, 2, EXPERTS)
    with pytest.raises(ValueError, match=r"experts \[T, k\]"):
        dispatcher.dispatch(x[:2], experts, weights)
    with pytest.raises(TypeError, match="splits are for planning with fake tensors"):
        AllToAllDispatcher(EXPERTS, dist.group.WORLD, splits="even").dispatch(x, experts, weights)
    rows, metadata = dispatcher.dispatch(x, experts, weights)
    with pytest.raises(ValueError, match="one output for each of the"):
        dispatcher.combine(rows[:-1], metadata)


def test_what_cannot_be_dispatched_is_refused_before_ranks_exchange_anything() -> None:
    run_on_ranks(2, refuse)


def rows_of_another_dtype() -> None:
    """fp32 tokens whose experts compute in bf16, as under autocast."""
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    x, experts, weights = inputs(4, 2, EXPERTS)
    rows, metadata = dispatcher.dispatch(x, experts, weights)
    out = dispatcher.combine(rows.bfloat16(), metadata)
    assert out.dtype == torch.float32
    loss_of(out).backward()
    assert x.grad is not None
    assert x.grad.shape == (4, HIDDEN)


def test_experts_may_answer_in_another_dtype() -> None:
    run_on_ranks(2, rows_of_another_dtype)
