"""What a dispatch costs, counted: bytes that leave a rank, exchanges, and waits of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_dispatch_toys import Exchanges, HostCopies, block, inputs, loss_of, scales, through
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwalk.moe_ep.dispatcher import AllToAllDispatcher
from shardwalk.parallelizer_core import replay_contexts
from shardwalk.parallelizer_core.testing import run_on_ranks

RANKS = 4
FORWARD = ["counts", "slots", "rows", "rows"]
BACKWARD = ["rows", "rows", "weights"]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One layer on one rank.

    Attributes:
        pairs: unique (token, other rank) of this rank's tokens.
        arriving_pairs: the same of the tokens that come here.
        slots: of this rank's tokens, for experts of other ranks.
        arriving_slots: the same of the tokens that come here.
        forward, backward: what was exchanged, by kind.
        forward_rows, backward_rows: bytes of rows that left, dispatch and combine.
        slot_bytes, weight_bytes: bytes of metadata that left, forward and backward.
        host: what the host waited in.
    """

    pairs: int
    arriving_pairs: int
    slots: int
    arriving_slots: int
    forward: list[str]
    backward: list[str]
    forward_rows: int
    backward_rows: int
    slot_bytes: int
    weight_bytes: int
    host: list[str]


def of_this_rank(
    tokens: int, top_k: int, experts: int, hidden: int, dtype: torch.dtype, dropped: float = 0.05
) -> Counted:
    """Routings of all ranks are drawn on each of them, so that it knows what must arrive."""
    rank, per_rank = dist.get_rank(), experts // RANKS
    torch.manual_seed(0)
    all_inputs = [
        inputs(tokens + index, top_k, experts, hidden=hidden, dtype=dtype, dropped=dropped)
        for index in range(RANKS)
    ]
    to = [torch.div(each[1], per_rank, rounding_mode="floor") for each in all_inputs]
    hits = torch.stack([
        torch.stack([(t == r).sum(1) for r in range(RANKS)]).clamp(max=1).sum(1) for t in to
    ])
    slots = torch.stack([torch.stack([(t == r).sum() for r in range(RANKS)]) for t in to])
    scale = block(scales(experts, hidden, dtype))
    dispatcher = AllToAllDispatcher(experts, dist.group.WORLD)
    with Exchanges() as forward, HostCopies() as host:
        output = through(dispatcher, *all_inputs[rank], scale)
    loss = loss_of(output)
    with Exchanges() as backward, HostCopies() as host_of_backward:
        loss.backward()
    for counts in (hits, slots):
        counts.fill_diagonal_(0)
    return Counted(
        pairs=int(hits[rank].sum()),
        arriving_pairs=int(hits[:, rank].sum()),
        slots=int(slots[rank].sum()),
        arriving_slots=int(slots[:, rank].sum()),
        forward=forward.kinds(),
        backward=backward.kinds(),
        forward_rows=forward.bytes_of("rows"),
        backward_rows=backward.bytes_of("rows"),
        slot_bytes=forward.bytes_of("slots"),
        weight_bytes=backward.bytes_of("weights"),
        host=host.names + host_of_backward.names,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden"), [(256, 8, 64, 64), (256, 2, 16, 256), (100, 1, 4, 32)]
)
def test_each_token_crosses_once_to_a_rank_and_once_back(
    tokens: int, top_k: int, experts: int, hidden: int, dtype: torch.dtype
) -> None:
    """Exactly: rows of unique (token, other rank), and 8 bytes a slot beside them."""
    row = hidden * dtype.itemsize
    for report in run_on_ranks(RANKS, of_this_rank, tokens, top_k, experts, hidden, dtype):
        crossing = report.pairs + report.arriving_pairs
        assert report.forward_rows == report.backward_rows == crossing * row
        assert report.slot_bytes == 8 * report.slots
        assert report.weight_bytes == 4 * report.arriving_slots
        # One row and its experts and weights, out and back again.
        stated = crossing * row + 8 * report.slots
        assert report.forward_rows + report.slot_bytes == pytest.approx(stated, rel=0.02)


def test_half_of_what_one_row_for_each_expert_would_move() -> None:
    """Top-8 of 64 experts on 4 ranks: chance gives 0.45."""
    for report in run_on_ranks(RANKS, of_this_rank, 512, 8, 64, 64, torch.float32, 0.0):
        per_expert = (report.slots + report.arriving_slots) * 64 * 4
        assert report.forward_rows <= 0.5 * per_expert
        assert report.forward_rows == pytest.approx(0.45 * per_expert, rel=0.05)


def test_exchanges_and_waits_of_one_layer() -> None:
    for report in run_on_ranks(RANKS, of_this_rank, 32, 4, 16, 16, torch.float32):
        assert report.forward == FORWARD
        assert report.backward == BACKWARD
        assert report.host == ["tolist"]


def collectives_of_a_step() -> set[str]:
    x, experts, weights = inputs(16, 2, 8)
    with Exchanges() as counted:
        dispatcher = AllToAllDispatcher(8, dist.group.WORLD)
        loss_of(through(dispatcher, x, experts, weights, block(scales(8)))).backward()
    return set(counted.calls)


def test_p27_nothing_is_gathered_or_reduced_over_ranks() -> None:
    """Not every token to every rank, nor whole outputs back: all-to-alls of what is needed."""
    assert run_on_ranks(RANKS, collectives_of_a_step) == [{"alltoall_base_"}] * RANKS


def without_gradients_of_weights() -> list[str]:
    x, experts, weights = inputs(16, 2, 8)
    scale = block(scales(8))
    output = through(AllToAllDispatcher(8, dist.group.WORLD), x, experts, weights.detach(), scale)
    with Exchanges() as backward:
        loss_of(output).backward()
    return backward.kinds()


def test_a_frozen_router_exchanges_no_gradients_of_weights() -> None:
    assert run_on_ranks(RANKS, without_gradients_of_weights) == [["rows", "rows"]] * RANKS


LAYERS, EXPERTS, TOP_K, TOKENS, HIDDEN = 4, 16, 2, 256, 256


def a_step_of_layers(recompute: bool) -> tuple[int, list[str], list[str]]:
    """All bytes of exchanges of a step, and what they carried forward and backward."""
    torch.manual_seed(dist.get_rank())
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    x, *_ = inputs(TOKENS, TOP_K, EXPERTS, hidden=HIDDEN)
    routings = [inputs(TOKENS, TOP_K, EXPERTS, hidden=1)[1:] for _ in range(LAYERS)]
    local = [block(scales(EXPERTS, HIDDEN)) for _ in range(LAYERS)]

    def layer(x: Tensor, experts: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
        return x + through(dispatcher, x.tanh(), experts, weights, scale)

    def call(*args: Any) -> Tensor:
        if not recompute:
            return layer(*args)
        output: Tensor = checkpoint(layer, *args, use_reentrant=False, context_fn=replay_contexts)
        return output

    with Exchanges() as forward:
        for routing, scale in zip(routings, local, strict=True):
            x = call(x, *routing, scale)
        loss = loss_of(x)
    with Exchanges() as backward:
        loss.backward()
    bytes_sent = sum(forward.bytes.values()) + sum(backward.bytes.values())
    return bytes_sent, forward.kinds(), backward.kinds()


def test_bytes_of_a_step() -> None:
    """At most 5.9 MB (10^6 bytes) a rank, counts and metadata and their gradients included."""
    reports = run_on_ranks(RANKS, a_step_of_layers, False)
    assert all(bytes_sent <= 5.9e6 for bytes_sent, _, _ in reports), reports
    for _, forward, backward in reports:
        assert forward == FORWARD * LAYERS
        assert backward == BACKWARD * LAYERS


def test_a_recomputed_step_sends_only_the_rows_again() -> None:
    for _, forward, backward in run_on_ranks(RANKS, a_step_of_layers, True):
        assert forward == FORWARD * LAYERS
        assert backward == ["rows", *BACKWARD] * LAYERS
