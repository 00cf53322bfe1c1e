"""transformers' generate on a parallel model: the tokens of one process, and no rank waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.testing import run_on_ranks
from tests.matrix.case_models import (
    FULL,
    assert_equal,
    gradients,
    mean_loss,
    mine,
    parallel,
    seeded,
    tokens,
    weights,
)
from tests.matrix.lora_models import lora
from tests.matrix.test_case_resharding import gathered
from tests.matrix.tiny_transformers import MODELS

KINDS = pytest.mark.parametrize(
    ("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4), ("ddp", 2)]
)
LONGEST = 9


def build(name: str, tied: bool = False) -> nn.Module:
    return lora(layers=3) if name == "lora" else MODELS[name](tied)


def prompt(rank: int) -> dict[str, Tensor]:
    """Two rows, of other lengths on every rank and padded on the left."""
    ids = tokens(rows=2, length=3 + 2 * rank, seed=rank) % 60 + 1
    mask = torch.ones_like(ids)
    mask[0, : 1 + rank] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def new_tokens(model: nn.Module, rank: int, **options: Any) -> Tensor:
    given = prompt(rank)
    options = {"max_new_tokens": LONGEST, "do_sample": False, **options}
    found: Tensor = model.generate(**given, **options)
    return found[:, given["input_ids"].shape[1] :]


def stopping(model: nn.Module, rank: int, **options: Any) -> dict[str, Any]:
    """What makes this rank stop after 2, 4, 6 or 8 tokens: an end that it comes to, or a limit."""
    if rank % 2:
        return {"max_new_tokens": 2 + 2 * rank}
    free = new_tokens(model, rank, **options)
    return {"eos_token_id": [int(row[min(1 + rank, len(row) - 1)]) for row in free]}


def generated(kind: str, name: str, tied: bool, options: dict[str, Any], stop: Any) -> Any:
    model = unwrap_model(parallel(seeded(build, name=name, tied=tied), kind))
    rank = dist.get_rank()
    with_stop = new_tokens(model, rank, **options, **stop[rank])
    return with_stop, new_tokens(model, rank, **options), gathered(model)


OPTIONS = {
    "cache": {"use_cache": True},
    # Without a cache, transformers 5.24 runs a rank that is done on a mask longer than its tokens.
    "no cache": {"use_cache": False},
    "beams": {"use_cache": True, "num_beams": 2},
}


@pytest.mark.pairwise
@KINDS
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("name", "tied"), [("llama", True), ("gemma3", False), ("lora", False)])
def test_ranks_that_stop_at_different_tokens(
    name: str, tied: bool, option: str, kind: str, world: int
) -> None:
    """Prompts of unequal lengths, ends at unequal tokens, limits that differ: as in one process."""
    reference = seeded(build, name=name, tied=tied)
    options = OPTIONS[option]
    even = option == "no cache"
    stop = [{} if even else stopping(reference, rank, **options) for rank in range(world)]
    results = run_on_ranks(world, generated, kind, name, tied, options, stop)
    for rank, (stopped, free, left) in enumerate(results):
        assert torch.equal(stopped, new_tokens(reference, rank, **options, **stop[rank]))
        assert torch.equal(free, new_tokens(reference, rank, **options))
        assert left == ([] if kind != "ddp" else [n for n, _ in reference.named_parameters()])
    if option == "cache":
        assert len({stopped.shape[1] for stopped, _, _ in results}) >= min(world, 2)


def train(model: nn.Module, seed: int, pick: Any) -> None:
    mean_loss(model, pick(tokens(rows=8, seed=seed))).backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()


def in_turns(model: nn.Module, rank: int, pick: Any) -> tuple[list[Tensor], Any, Any]:
    inner = unwrap_model(model)
    found = [new_tokens(inner, rank)]
    train(model, 0, pick)
    found.append(new_tokens(inner, rank, max_new_tokens=3 + rank, use_cache=True))
    with pytest.raises(IndexError):
        inner.generate(torch.full((1, 3), 99), max_new_tokens=2, do_sample=False)
    found.append(new_tokens(inner, rank, use_cache=False))
    model.zero_grad()
    train(model, 1, pick)
    return found, gradients(model), weights(model)


def in_turns_on_ranks(kind: str, name: str) -> Any:
    return in_turns(parallel(seeded(build, name=name), kind), dist.get_rank(), mine)


def all_rows(rows: Tensor) -> Tensor:
    return rows


@KINDS
@pytest.mark.parametrize("name", ["llama", "lora"])
def test_generating_and_training_in_turns(name: str, kind: str, world: int) -> None:
    """Generate, train, generate, fail, generate, train: each sees the weights as they are then."""
    expected = in_turns(seeded(build, name=name), 0, all_rows)
    for rank, (found, grads, state) in enumerate(
        run_on_ranks(world, in_turns_on_ranks, kind, name)
    ):
        assert_equal(grads, expected[1])
        assert_equal(state, expected[2])
        reference = in_turns(seeded(build, name=name), rank, all_rows)[0]
        assert all(map(torch.equal, found, reference))


def in_bf16(kind: str) -> Tensor:
    policy = {**FULL, "param_dtype": "bfloat16"}
    model = parallel(seeded(build, name="llama"), kind, mp_policy=policy)
    return new_tokens(model, dist.get_rank())


def test_a_policy_that_casts_gives_the_tokens_of_the_cast_model() -> None:
    reference = seeded(build, name="llama").to(torch.bfloat16)
    for rank, found in enumerate(run_on_ranks(2, in_bf16, "fsdp")):
        assert torch.equal(found, new_tokens(reference, rank))
