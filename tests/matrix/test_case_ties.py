"""Weights under two names: untied by a start on meta, by shards, by a unit that takes one name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core import ModelParallelizer, describe_units, materialize
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.state_dicts import load_model_state_dict, model_state_dict
from shardwalk.parallelizer_core.testing import TinyDecoder, run_on_ranks
from tests.matrix.case_models import (
    assert_equal,
    gradients,
    mean_loss,
    mine,
    on_meta,
    parallel,
    seeded,
    tokens,
    weights,
)
from tests.matrix.tiny_transformers import MODELS


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 5)
        self.down = nn.Linear(5, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class ThreeNames(nn.Module):
    """One table under three names: as a module that stands twice, and as the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 6)
        self.encoder = nn.Module()
        self.encoder.embed = self.embed
        self.encoder.layers = nn.ModuleList(Block(6) for _ in range(2))
        self.layers = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.encoder.embed(ids)
        for block in self.encoder.layers:
            memory = block(memory)
        x = self.embed(ids) + memory.mean(1, keepdim=True)
        for block in self.layers:
            x = block(x)
        return self.head(x)


class OneBlockOften(nn.Module):
    """Every layer is the same block, and two weights inside of it are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 6)
        block = Block(6)
        block.down = nn.Linear(5, 6, bias=False)
        block.again = nn.Linear(6, 5, bias=False)
        block.again.weight = block.up.weight
        self.layers = nn.ModuleList([block] * 3)
        self.head = nn.Linear(6, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return self.head(x)


class TiedBlocks(nn.Module):
    """The tables and one matrix of the first and the last block are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 6)
        self.layers = nn.ModuleList(Block(6) for _ in range(3))
        self.layers[2].up.weight = self.layers[0].up.weight  # type: ignore[union-attr]
        self.head = nn.Linear(6, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return self.head(x)


class SharedModules(nn.Module):
    """Blocks that hold one norm, and two of them one matrix; beside tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 6)
        first, second, third, fourth = (Block(6) for _ in range(4))
        second.norm = first.norm
        third.up = first.up
        third.down.weight = second.down.weight
        self.layers = nn.ModuleList([first, second, third, fourth])
        self.head = nn.Linear(6, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return self.head(x)


def llama(**unused: Any) -> nn.Module:
    return MODELS["llama"](True)


def gemma(**unused: Any) -> nn.Module:
    return MODELS["gemma3"](True)


def decoder() -> nn.Module:
    return TinyDecoder(tied=True)


TIED = [decoder, llama, gemma, ThreeNames, OneBlockOften, TiedBlocks, SharedModules]


def table(model: nn.Module, name: str) -> Tensor:
    inner: Any = unwrap_model(model)
    if hasattr(inner, "model"):
        return (inner.model.embed_tokens if name == "embed" else inner.lm_head).weight
    return (inner.embed if name == "embed" else inner.head).weight


def head_key(model: nn.Module) -> str:
    return "lm_head.weight" if hasattr(model, "model") else "head.weight"


def started(make: Any, kind: str, order: str, path: Path) -> nn.Module:
    model: nn.Module = on_meta(make)
    if order == "materialize first":
        materialize(model, checkpoint=path)
    model = parallel(model, kind)
    if order != "materialize first":
        materialize(model, checkpoint=path)
    return model


def train(model: nn.Module, ids: Tensor) -> dict[str, Tensor | None]:
    """Three steps of SGD; the gradients of the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first: dict[str, Tensor | None] = {}
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(model, ids).backward()
        first = first or gradients(model)
        optimizer.step()
    return first


def tied_run(make: Any, kind: str, order: str, path: Path) -> Any:
    model = started(make, kind, order, path)
    first = train(model, mine(tokens()))
    names = [name for name, _ in unwrap_model(model).named_parameters()]
    held = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()
    )
    return table(model, "head") is table(model, "embed"), names, first, weights(model), held


ORDERS = [
    ("fsdp", 2, "shard first"),
    ("fsdp", 2, "materialize first"),
    ("hsdp", 4, "shard first"),
    ("ddp", 2, "materialize first"),
]


@pytest.mark.parametrize(("kind", "world", "order"), ORDERS)
@pytest.mark.parametrize("make", TIED)
def test_a_tie_survives_the_start_on_meta(
    make: Any, kind: str, world: int, order: str, tmp_path: Path
) -> None:
    """B03, B68: one tensor, one shard of it per rank, one gradient, the same after three steps."""
    reference = seeded(make)
    names = [name for name, _ in reference.named_parameters()]
    parameters = sum(p.numel() for p in reference.parameters())
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    first = train(reference, tokens())
    results = run_on_ranks(world, tied_run, make, kind, order, tmp_path)
    for tied, found, grads, trained, _ in results:
        assert tied
        assert found == names
        assert_equal(grads, first)
        assert_equal(trained, weights(reference))
    copies = {"fsdp": 1, "hsdp": 2, "ddp": world}[kind]
    assert sum(held for *_, held in results) == copies * parameters


def loaded(make: Any, state: dict[str, Tensor], kind: str) -> tuple[bool, bool]:
    model = parallel(seeded(make, seed=9), kind)
    load_model_state_dict(model, state)
    full = model_state_dict(model, full=True)
    same = all(torch.equal(full[name], tensor) for name, tensor in state.items())
    return table(model, "head") is table(model, "embed"), same


@pytest.mark.parametrize("key", ["both", "embed", "head"])
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("ddp", 2)])
@pytest.mark.parametrize("make", [llama, ThreeNames])
def test_a_full_state_loads_with_either_key(make: Any, kind: str, world: int, key: str) -> None:
    """B03: files of tied models have the head's key or not."""
    source = seeded(make)
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    others = [
        n for n, p in source.named_parameters(remove_duplicate=False) if p is table(source, "embed")
    ]
    for name in others:
        keep = name == head_key(source) if key == "head" else name != head_key(source)
        if key != "both" and not keep:
            del state[name]
    assert run_on_ranks(world, loaded, make, state, kind) == [(True, True)] * world


def frozen_table(make: Any) -> tuple[list[str], dict[str, Tensor | None]]:
    model = seeded(make)
    table(model, "embed").requires_grad_(False)
    model = parallel(model)
    mean_loss(model, mine(tokens())).backward()
    return [unit.name for unit in describe_units(model)], gradients(model)


@pytest.mark.parametrize("make", [llama, ThreeNames])
def test_a_frozen_tied_table_stays_in_the_root(make: Any) -> None:
    """B68: it has no gradient, and the others have those of one process."""
    reference = seeded(make)
    table(reference, "embed").requires_grad_(False)
    mean_loss(reference, tokens()).backward()
    for units, grads in run_on_ranks(2, frozen_table, make):
        assert not [name for name in units if "embed" in name or "head" in name]
        assert_equal(grads, gradients(reference))


class TakesTheTable(ModelParallelizer):
    """A sidecar that makes the embedding a unit although the head shares its weight."""

    def _apply_fsdp_sharding(self, module, mesh, mp_policy, *args, **kwargs):  # type: ignore[no-untyped-def]
        self._fully_shard_module(module.embed, mesh=mesh, mp_policy=mp_policy)
        super()._apply_fsdp_sharding(module, mesh, mp_policy, *args, **kwargs)


class Torn(TinyDecoder):
    parallelizer = TakesTheTable()


def torn_apart() -> str:
    try:
        model = parallel(seeded(Torn, tied=True))
        mean_loss(model, mine(tokens())).backward()
    except ValueError as error:
        return str(error)
    return "silent"


def test_a_sidecar_that_tears_a_tie_apart_is_stopped() -> None:
    """B68: never two groups that both step one weight."""
    for message in run_on_ranks(2, torn_apart):
        assert "shared" in message
