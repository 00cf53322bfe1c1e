"""Canonical state dicts: original names under every wrapper, loads into any layout (B54)."""

from __future__ import annotations

from typing import Any

import pytest
import state_toys as toys
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core.optimizer_state import (
    load_optimizer_state_dict,
    optimizer_state_dict,
)
from shardwalk.parallelizer_core.state_dicts import load_model_state_dict, model_state_dict
from shardwalk.parallelizer_core.state_mismatch import StateMismatchError
from shardwalk.parallelizer_core.testing import run_on_ranks


def wrapped(model: toys.ToyLM) -> toys.ToyLM:
    """Checkpointing on a part of each block, compile around the first block and the norm."""
    for block in model.blocks:
        block.up = checkpoint_wrapper(block.up)  # type: ignore[assignment]
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")  # type: ignore[assignment]
    model.norm = torch.compile(model.norm, backend="eager")  # type: ignore[assignment]
    return model


def full_state(sharding: str, wrap: bool, tied: bool, cpu: bool) -> dict[str, Tensor]:
    model = toys.toy(seed=3, tied=tied)
    model = wrapped(model) if wrap else model
    sharded = toys.SHARDINGS[sharding](model)
    local = model_state_dict(sharded)
    full = model_state_dict(sharded, full=True, cpu=cpu)
    assert local.keys() == full.keys()
    if tied:
        assert full["head.weight"] is full["embed.weight"]
    if sharding in {"fsdp", "hsdp", "fsdp_tp"}:
        assert all(isinstance(value, DTensor) for value in local.values())
        whole = sum(value.numel() for value in full.values())
        held = sum(value.to_local().numel() for value in local.values())
        assert held < 0.8 * whole
    assert all(type(value) is Tensor for value in full.values())
    full["norm.weight"].add_(100.0)  # copies: the model does not change
    assert model_state_dict(sharded, full=True)["norm.weight"].max() < 50
    full["norm.weight"].sub_(100.0)
    return full


@pytest.mark.parametrize(
    ("sharding", "world", "wrap"),
    [
        ("fsdp", 2, False),
        ("fsdp", 2, True),
        ("tp", 2, False),
        ("ddp", 2, False),
        ("ddp", 2, True),
        ("hsdp", 4, True),
        ("fsdp_tp", 4, False),
    ],
)
def test_names_and_values_are_those_of_the_plain_model(
    sharding: str, world: int, wrap: bool
) -> None:
    """B54: the same names under checkpointing and compile; full values on every rank."""
    for tied in (False, True) if sharding == "fsdp" else (False,):
        expected = toys.toy(seed=3, tied=tied).state_dict()
        for state in run_on_ranks(world, full_state, sharding, wrap, tied, cpu=tied):
            assert list(state) == list(expected)
            for name, tensor in expected.items():
                torch.testing.assert_close(state[name], tensor)
                assert name == "norm.weight" or torch.equal(state[name], tensor), name


def test_one_process() -> None:
    model = toys.toy()
    assert list(model_state_dict(model)) == list(model.state_dict())
    assert list(model_state_dict(wrapped(toys.toy()))) == list(model.state_dict())


def load_into(sharding: str, wrap: bool, source: str) -> dict[str, Tensor]:
    model = toys.toy(seed=1, tied=True)
    model = wrapped(model) if wrap else model
    sharded = toys.SHARDINGS[sharding](model)
    parameters = list(sharded.parameters())
    given: Any = toys.toy(seed=3, tied=True)
    if source == "full bf16":
        given = given.to(torch.bfloat16)
    elif source != "full":
        given = toys.SHARDINGS[source](given)
    load_model_state_dict(sharded, model_state_dict(given))
    assert all(a is b for a, b in zip(parameters, sharded.parameters(), strict=True))
    return model_state_dict(sharded, full=True)


@pytest.mark.parametrize(
    ("sharding", "source", "wrap"),
    [
        ("fsdp", "full", True),
        ("fsdp", "full bf16", False),
        ("ddp", "full", True),
        ("fsdp", "fsdp", True),
        ("hsdp", "fsdp", False),
        ("fsdp", "fsdp_tp", False),
        ("ddp", "hsdp", False),
        ("fsdp_tp", "ddp", False),
    ],
)
def test_state_dicts_load_into_any_layout(sharding: str, source: str, wrap: bool) -> None:
    expected = toys.toy(seed=3, tied=True)
    if source == "full bf16":
        expected = expected.to(torch.bfloat16).float()
    for state in run_on_ranks(4, load_into, sharding, wrap, source):
        for name, tensor in expected.state_dict().items():
            assert torch.equal(state[name], tensor), name


def test_a_full_state_loads_strictly_into_the_plain_model() -> None:
    for state in run_on_ranks(2, full_state, "fsdp", True, False, cpu=True):
        toys.toy().load_state_dict(state, strict=True)


def test_errors_list_all_names_and_nothing_is_written() -> None:
    model = toys.toy()
    before = model_state_dict(model, full=True)
    state = dict(toys.toy(seed=1).state_dict())
    state["other.weight"] = state.pop("embed.weight")
    state["norm.bias"] = torch.zeros(2)
    state["norm.weight"] = "text"  # type: ignore[assignment]
    with pytest.raises(StateMismatchError) as raised:
        load_model_state_dict(model, state)
    for part in (
        "missing (1): embed.weight;",
        "unexpected (1): other.weight;",
        "norm.bias (model [6], source [2])",
        "norm.weight (a str, not a tensor)",
    ):
        assert part in str(raised.value)
    for name, tensor in model_state_dict(model).items():
        assert torch.equal(tensor, before[name])
    del state["norm.bias"], state["norm.weight"]
    load_model_state_dict(model, state, strict=False)
    assert torch.equal(model.head.weight, state["head.weight"])
    assert torch.equal(model.embed.weight, before["embed.weight"])


def test_tied_names() -> None:
    model, state = toys.toy(tied=True), toys.toy(seed=1, tied=True).state_dict()
    with pytest.raises(StateMismatchError, match="one tied tensor in the model"):
        load_model_state_dict(model, toys.toy(seed=1).state_dict())
    del state["embed.weight"]
    load_model_state_dict(model, state)
    assert torch.equal(model.embed.weight, state["head.weight"])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.linear = nn.Linear(1, 1)

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_extra_state_of_modules() -> None:
    source, model = nn.Sequential(Counting()), nn.Sequential(Counting())
    source[0].count = 7
    state = model_state_dict(source, full=True)
    assert state["0._extra_state"] == 7
    load_model_state_dict(model, state)
    assert model[0].count == 7
    del state["0._extra_state"]
    with pytest.raises(StateMismatchError, match=r"missing .1.: 0._extra_state"):
        load_model_state_dict(model, state)


def test_strict_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="strict must be True or False, got 'no'"):
        load_model_state_dict(toys.toy(), {}, strict="no")  # type: ignore[arg-type]


def test_cpu_needs_full() -> None:
    with pytest.raises(ValueError, match="cpu=True needs full=True"):
        model_state_dict(toys.toy(), cpu=True)


def stepped(sharding: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = toys.toy(seed=3, tied=True)
    model.norm.requires_grad_(False)
    sharded = toys.SHARDINGS[sharding](model)
    optimizer = torch.optim.AdamW(groups_of(sharded), lr=1e-2, **options)
    for _ in range(2):
        toys.mean_loss(sharded, *toys.my_rows(sharding, *toys.batch())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sharded, optimizer


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def optimizer_round_trip(sharding: str) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = stepped(sharding)
    full = optimizer_state_dict(model, optimizer, full=True)
    fresh = torch.optim.AdamW(groups_of(model), lr=5.0)
    load_optimizer_state_dict(model, fresh, full)
    return full, optimizer_state_dict(model, fresh, full=True)


@pytest.mark.parametrize(("sharding", "world"), [("fsdp", 2), ("ddp", 2), ("fsdp_tp", 4)])
def test_optimizer_state_by_name(sharding: str, world: int) -> None:
    """Full state equals that of one process; frozen parameters have none; it loads back."""
    model, optimizer = stepped("single")
    expected = optimizer_state_dict(model, optimizer)
    assert "norm.weight" in expected["param_groups"][1]["params"]
    for full, loaded in run_on_ranks(world, optimizer_round_trip, sharding):
        for state in (full, loaded):
            assert state["param_groups"] == expected["param_groups"]
            assert state["state"].keys() == expected["state"].keys()
            assert "norm.weight" not in state["state"]
            for name, entry in expected["state"].items():
                for key, value in entry.items():
                    torch.testing.assert_close(
                        state["state"][name][key], value, rtol=1e-4, atol=1e-6
                    )


def test_loading_replaces_all_state() -> None:
    """State of a parameter that the saved run never stepped goes too."""
    model, optimizer = stepped("single")
    untouched = torch.optim.AdamW(groups_of(model), lr=1e-2)
    load_optimizer_state_dict(model, optimizer, optimizer_state_dict(model, untouched))
    assert not optimizer.state


def test_optimizer_errors() -> None:
    model, optimizer = stepped("single")
    state = optimizer_state_dict(model, optimizer)
    state["state"]["gone"] = state["state"].pop("embed.weight")
    state["param_groups"][0]["params"].append("gone")
    with pytest.raises(StateMismatchError, match=r"gone .group 0., gone .its state."):
        load_optimizer_state_dict(model, optimizer, state)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(StateMismatchError, match="parameter groups .optimizer 1, saved 2."):
        load_optimizer_state_dict(model, other, optimizer_state_dict(model, optimizer))
    with pytest.raises(ValueError, match="build the optimizer after the model was parallelized"):
        optimizer_state_dict(model, torch.optim.SGD(toys.toy().parameters(), lr=1.0))
