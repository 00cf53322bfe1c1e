"""Gradients that weigh tokens by where they fell: by rank, by micro-batch, by an empty rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.parallelizer_core import TokenNormalizer, sync_gradients_on_last
from shardwalk.parallelizer_core.testing import run_on_ranks
from tests.matrix.case_models import (
    assert_equal,
    context,
    gradients,
    logits_of,
    parallel,
    seeded,
    tokens,
)
from tests.matrix.tiny_transformers import MODELS

# Valid tokens per data rank and micro-batch, of 8 each.
COUNTS = {
    "1 and 7": [[1], [7]],
    "two micro-batches of 3 and 5": [[3, 5], [5, 3]],
    "nothing on one rank": [[0], [8]],
    "an empty micro-batch and an empty rank": [[0, 4], [0, 0]],
}
SHARDINGS = [("fsdp", 1), ("fsdp", 2), ("ddp", 2), ("fsdp", 4), ("hsdp", 4)]


def counts_for(name: str, ranks: int) -> list[list[int]]:
    """The counts of two ranks, given out in turn; one rank takes the micro-batches of both."""
    two = COUNTS[name]
    return [[*two[0], *two[1]]] if ranks == 1 else (two * 2)[:ranks]


def micro_batches(counts: list[list[int]]) -> list[list[tuple[Tensor, Tensor]]]:
    total = sum(map(len, counts))
    rows = iter(tokens(rows=2 * total, length=5).split(2))
    found = []
    for rank in counts:
        mine = []
        for valid in rank:
            part = next(rows)
            labels = part[:, 1:].flatten().clone()
            labels[valid:] = -100
            mine.append((part[:, :-1], labels))
        found.append(mine)
    return found


def token_losses(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(model, inputs).flatten(0, 1), labels, reduction="none")


def steps(kind: str) -> list[tuple[dict[str, Tensor | None], float]]:
    model = parallel(seeded(MODELS["llama"], tied=True), kind)
    found = []
    for name in COUNTS:
        model.zero_grad()
        ranks = dist.get_world_size()
        mine = micro_batches(counts_for(name, ranks))[dist.get_rank()]
        normalizer = TokenNormalizer(context(kind), [(y != -100).sum() for _, y in mine])
        total = torch.zeros(())
        for inputs, labels in sync_gradients_on_last(model, mine):
            loss = normalizer(token_losses(model, inputs, labels))
            loss.backward()
            total += loss.detach() / ranks
        dist.all_reduce(total)
        found.append((gradients(model), total.item()))
    return found


def one_process(name: str, ranks: int) -> tuple[nn.Module, float, dict[str, Tensor | None]]:
    """The right gradients, and those of the mean over the ranks' own means."""
    batches = micro_batches(counts_for(name, ranks))
    model = seeded(MODELS["llama"], tied=True)
    flat = [batch for rank in batches for batch in rank]
    valid = sum(int((labels != -100).sum()) for _, labels in flat)
    loss = torch.stack([token_losses(model, *batch).sum() for batch in flat]).sum() / valid
    loss.backward()
    naive = seeded(MODELS["llama"], tied=True)
    for rank in batches:
        for inputs, labels in rank:
            own = token_losses(naive, inputs, labels).sum() / max(1, int((labels != -100).sum()))
            (own / len(rank) / len(batches)).backward()
    return model, loss.item(), gradients(naive)


@pytest.mark.parametrize(("kind", "world"), SHARDINGS)
def test_every_token_weighs_the_same_wherever_it_fell(kind: str, world: int) -> None:
    """B01: a mean of the ranks' means weighs the tokens of a nearly empty rank too much."""
    results = run_on_ranks(world, steps, kind)
    for index, name in enumerate(COUNTS):
        model, loss, naive = one_process(name, world)
        expected = gradients(model)
        norm = naive["model.norm.weight"]
        wanted = expected["model.norm.weight"]
        assert norm is not None
        assert wanted is not None
        if (kind, world, name) != ("fsdp", 2, "two micro-batches of 3 and 5"):
            assert not torch.allclose(norm, wanted, rtol=1e-3)
        for found in results:
            measured, value = found[index]
            assert value == pytest.approx(loss, rel=1e-5)
            assert all(g is None or bool(g.isfinite().all()) for g in measured.values())
            assert_equal(measured, expected)
