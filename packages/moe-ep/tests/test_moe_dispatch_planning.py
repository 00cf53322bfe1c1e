"""Planning: the exchanges and shapes of many ranks, on fake tensors in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from moe_dispatch_toys import Exchanges
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwalk.moe_ep.dispatcher import AllToAllDispatcher, ExchangeSizes

RANKS, RANK, EXPERTS, TOKENS, TOP_K, HIDDEN = 64, 5, 128, 512, 8, 32


@contextmanager
def fake_world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def fake_step(dispatcher: AllToAllDispatcher, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    experts = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    weights = torch.rand(TOKENS, TOP_K, requires_grad=True)
    rows, metadata = dispatcher.dispatch(x, experts, weights)
    assert rows.shape == (sum(metadata.counts), HIDDEN)
    output = dispatcher.combine(rows * 2, metadata)
    output.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return output, x.grad, weights.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_on_64_fake_ranks(dtype: torch.dtype) -> None:
    with fake_world() as group, FakeTensorMode(), Exchanges() as exchanged:
        dispatcher = AllToAllDispatcher(EXPERTS, group, splits="even")
        output, of_x, of_weights = fake_step(dispatcher, dtype)
    assert output.shape == of_x.shape == (TOKENS, HIDDEN)
    assert output.dtype == of_x.dtype == dtype
    assert of_weights.shape == (TOKENS, TOP_K)
    assert exchanged.kinds() == ["counts", "slots", "rows", "rows", "rows", "rows", "weights"]
    crossing = TOKENS * TOP_K * (RANKS - 1) // RANKS
    assert exchanged.bytes_of("slots") == crossing * 8
    assert exchanged.bytes_of("rows") == 4 * crossing * HIDDEN * dtype.itemsize


def test_sizes_may_be_given() -> None:
    """All tokens of all ranks to experts of this rank and the next one."""
    to, slots = [0] * RANKS, [0] * RANKS
    to[RANK] = to[RANK + 1] = TOKENS
    slots[RANK] = slots[RANK + 1] = TOKENS * TOP_K // 2
    sizes = ExchangeSizes(
        sent_rows=to,
        received_rows=[TOKENS] * RANKS,
        sent_slots=slots,
        received_slots=[TOKENS * TOP_K // 2] * RANKS,
        counts=[TOKENS * TOP_K // 4 * RANKS] * 2,
    )
    with fake_world() as group, FakeTensorMode(), Exchanges() as exchanged:
        output, *_ = fake_step(AllToAllDispatcher(EXPERTS, group, splits=sizes), torch.float32)
    assert output.shape == (TOKENS, HIDDEN)
    rows = [size for _, _, size in exchanged.sent[2:6]]
    row = HIDDEN * 4
    assert rows == [TOKENS * row, TOKENS * 63 * row, TOKENS * row, TOKENS * 63 * row]


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"received_slots=\[1, 2\] and counts=\[4\]"):
        ExchangeSizes(
            sent_rows=[1, 1],
            received_rows=[1, 1],
            sent_slots=[1, 2],
            received_slots=[1, 2],
            counts=[4],
        )


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_even_sizes_agree_between_ranks(ranks: int, top_k: int) -> None:
    sizes = [
        ExchangeSizes.even(tokens=5, top_k=top_k, num_experts=24, ranks=ranks, rank=rank)
        for rank in range(ranks)
    ]
    for one in range(ranks):
        assert sum(sizes[one].sent_rows) == 5 * min(top_k, ranks)
        for other in range(ranks):
            assert sizes[one].sent_rows[other] == sizes[other].received_rows[one]
            assert sizes[one].sent_slots[other] == sizes[other].received_slots[one]
    assert sum(sum(each.counts) for each in sizes) == ranks * 5 * top_k


def test_the_counts_of_fake_tensors_still_cannot_be_read() -> None:
    """Else planning needs no given sizes any more."""
    with FakeTensorMode(), pytest.raises(Exception, match="_local_scalar_dense"):
        torch.zeros(3, dtype=torch.int64).sum().item()
