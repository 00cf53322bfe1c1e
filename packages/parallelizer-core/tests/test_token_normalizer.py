"""The loss as a mean over all valid tokens of a step (B01, P9)."""

from __future__ import annotations

from typing import Any

import pytest
import state_toys as toys
import torch
import torch.distributed as dist
from torch import Tensor

from shardwalk.mesh import DistributedSetup, MeshContext, ParallelismSizes
from shardwalk.parallelizer_core.gradients import TokenNormalizer, sync_gradients_on_last
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

# Valid tokens per data rank and micro-batch; each micro-batch is two rows of four tokens.
UNEQUAL = {
    1: [[1, 7]],
    2: [[1, 3], [7, 5]],
    4: [[1, 3], [7, 5], [0, 0], [8, 2]],
}


def labels(y: Tensor, valid: int) -> Tensor:
    flat = y.flatten().clone()
    flat[valid:] = -100
    return flat.view_as(y)


def data(ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Per data rank its micro-batches, with unequal numbers of valid tokens."""
    x, y = toys.batch(rows=4 * ranks, length=4)
    parts = iter(zip(x.split(2), y.split(2), strict=True))
    return [
        [(part[0], labels(part[1], valid)) for valid, part in zip(counts, parts, strict=False)]
        for counts in UNEQUAL[ranks]
    ]


def reference(ranks: int) -> tuple[dict[str, Tensor], float]:
    model = toys.toy()
    batches = [micro_batch for rank in data(ranks) for micro_batch in rank]
    valid = sum(int((y != -100).sum()) for _, y in batches)
    loss = torch.stack([toys.token_losses(model, x, y).sum() for x, y in batches]).sum() / valid
    loss.backward()
    return toys.whole_gradients(model), loss.item()


def context(strategy: str = "fsdp2", **sizes: int) -> MeshContext:
    def make() -> MeshContext:
        return DistributedSetup.build(
            strategy=strategy, parallelism_sizes=ParallelismSizes(**sizes)
        ).mesh_context

    return cached(("normalizer", strategy, tuple(sizes.items())), make)


def step(sharding: str) -> tuple[dict[str, Tensor], float, int]:
    mesh_context = {
        "fsdp": context,
        "hsdp": lambda: context(dp_replicate_size=2),
        "fsdp_tp": lambda: context(tp_size=2),
        "ddp": lambda: context("ddp"),
    }[sharding]()
    rank, ranks = toys.data_rank(sharding)
    mine = data(ranks)[rank]
    total = torch.zeros(())
    model = toys.SHARDINGS[sharding](toys.toy())
    normalizer = TokenNormalizer(mesh_context, [(y != -100).sum() for _, y in mine])
    for x, y in sync_gradients_on_last(model, mine):
        loss = normalizer(toys.token_losses(model, x, y))
        loss.backward()
        total += loss.detach()
    mean = normalizer.global_loss(total)
    return toys.whole_gradients(model), mean.item(), normalizer.global_tokens


@pytest.mark.parametrize(
    ("sharding", "world", "ranks"),
    [("fsdp", 2, 2), ("ddp", 2, 2), ("fsdp", 4, 4), ("hsdp", 4, 4), ("fsdp_tp", 4, 2)],
)
def test_gradients_weigh_every_token_alike(sharding: str, world: int, ranks: int) -> None:
    """B01: unequal counts per rank and micro-batch, a rank with none; tp peers count once."""
    expected, loss = reference(ranks)
    for gradients, measured, tokens in run_on_ranks(world, step, sharding):
        assert tokens == sum(map(sum, UNEQUAL[ranks]))
        assert measured == pytest.approx(loss, rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


def no_tokens_anywhere() -> tuple[float, float, int, bool]:
    model = toys.fsdp(toys.toy())
    normalizer = TokenNormalizer(context(), 0)
    x, y = toys.batch(rows=2)
    loss = normalizer(toys.token_losses(model, x, torch.full_like(y, -100)))
    loss.backward()
    finite = all(bool(g.isfinite().all()) for g in toys.whole_gradients(model).values())
    return loss.item(), normalizer.scale, normalizer.global_tokens, finite


def test_no_valid_token_on_any_rank() -> None:
    assert run_on_ranks(2, no_tokens_anywhere) == [(0.0, 0.0, 0, True)] * 2


def huge_counts() -> tuple[int, float]:
    normalizer = TokenNormalizer(context(), [2_000_000_000, torch.tensor([1_000_000_000])])
    return normalizer.global_tokens, normalizer.scale


def test_counts_are_64_bit() -> None:
    """P9: six billion tokens stay six billion."""
    assert run_on_ranks(2, huge_counts) == [(6_000_000_000, 2 / 6_000_000_000)] * 2


def cp_context() -> tuple[int, float]:
    """Two ranks of cp, each with half of the tokens."""
    normalizer = TokenNormalizer(context(cp_size=2), 3 + dist.get_rank())
    return normalizer.global_tokens, normalizer.scale


def test_cp_ranks_count_as_data_ranks() -> None:
    assert run_on_ranks(2, cp_context) == [(7, 2 / 7)] * 2


def bad_on_rank_1(count: object) -> str:
    try:
        TokenNormalizer(context(), count if dist.get_rank() else 3)  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (-1, "ValueError: valid_token_counts must not be negative, got -1"),
        ([2, torch.tensor([4, -5])], "ValueError: valid_token_counts must not be negative, got -5"),
        (2.0, "TypeError: valid_token_counts must be integers (for a mask, pass mask.sum())"),
        (torch.tensor([True]), "TypeError: valid_token_counts must be integers"),
        ("3", "TypeError: valid_token_counts must be integers"),
        (2**63, "ValueError: valid_token_counts must be at most 2305843009213693952 per rank"),
        (2**61 + 1, "ValueError: valid_token_counts must be at most 2305843009213693952"),
        (torch.tensor([2**62] * 4), "ValueError: valid_token_counts must be at most"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "NotImplementedError"),
    ],
)
def test_a_bad_count_on_one_rank_raises_on_all(count: object, message: str) -> None:
    other, own = run_on_ranks(2, bad_on_rank_1, count)
    assert own.startswith(message)
    assert other.startswith("ValueError: 1 other rank(s) gave a valid_token_counts")


def test_without_a_mesh() -> None:
    """One process: a sum of token losses over their number, in float32 for bf16 losses."""
    normalizer = TokenNormalizer(MeshContext(), [torch.tensor(3), 1])
    assert (normalizer.global_tokens, normalizer.scale) == (4, 0.25)
    losses = torch.full((1000,), 1.001, dtype=torch.bfloat16)
    assert normalizer(losses).dtype == torch.float32
    assert normalizer(losses).item() == pytest.approx(losses.double().sum().item() / 4)
    assert normalizer(torch.empty(0)).item() == 0.0
    with pytest.raises(TypeError, match="token_losses must be floating point"):
        normalizer(torch.tensor([1]))
    with pytest.raises(TypeError, match="token_losses must be a tensor, got a float"):
        normalizer(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [DistributedSetup(mesh_context=MeshContext()), None])
def test_a_context_that_is_none(given: Any) -> None:
    with pytest.raises(TypeError, match=r"pass the \.mesh_context of the DistributedSetup"):
        TokenNormalizer(given, 1)
