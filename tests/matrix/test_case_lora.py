"""Adapters that do not train: beside a frozen base, unread, or added too late."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardwalk.parallelizer_core import clip_grad_norm_, describe_units
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.testing import run_on_ranks
from tests.matrix.case_models import (
    BF16,
    FULL,
    assert_equal,
    gradients,
    mean_loss,
    mine,
    parallel,
    seeded,
    tokens,
    whole,
)
from tests.matrix.lora_models import Unused, adapter_names, lora, with_adapters
from tests.matrix.tiny_transformers import MODELS

KINDS = pytest.mark.parametrize(
    ("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4), ("ddp", 2)]
)
bf16_base = partial(lora, base_dtype=torch.bfloat16)


def trained_once(make: Any, kind: str, policy: Any) -> dict[str, Any]:
    options = {} if kind == "ddp" else {"mp_policy": policy}
    model = parallel(seeded(make), kind, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mean_loss(model, mine(tokens(rows=8))).backward()
    found = {"gradients": gradients(model), "units": describe_units(model)}
    optimizer.step()
    names = {id(p): name for name, p in unwrap_model(model).named_parameters()}
    found["state"] = sorted(names[id(parameter)] for parameter in optimizer.state)
    found["shapes"] = {name: p.shape for name, p in unwrap_model(model).named_parameters()}
    return found


def check_gradients(grads: Any, reference: nn.Module, tolerance: float) -> None:
    adapters = adapter_names(reference)
    assert len(adapters) == 4 * 3 * 2  # layers, targets, factors
    for name, gradient in grads.items():
        if name in adapters:
            assert gradient.abs().max() > 0, name
        else:
            assert gradient is None, name
    assert_equal(grads, gradients(reference), tolerance=tolerance)


@KINDS
@pytest.mark.parametrize("make", [lora, bf16_base])
def test_every_adapter_trains_and_nothing_else(make: Any, kind: str, world: int) -> None:
    """B12: a frozen base in fp32 or bf16 below adapters in fp32, each computing in its own dtype."""
    reference = seeded(make)
    mean_loss(reference, tokens(rows=8)).backward()
    for found in run_on_ranks(world, trained_once, make, kind, FULL):
        check_gradients(found["gradients"], reference, 1e-5)
        assert found["state"] == sorted(adapter_names(reference))
        assert found["shapes"] == {name: p.shape for name, p in reference.named_parameters()}
        if kind != "ddp":
            # One unit per block: a frozen weight of another dtype needs no gather of its own.
            names = [unit.name for unit in found["units"]]
            assert names == ["base_model.model"] + [
                f"base_model.model.model.layers.{index}" for index in range(4)
            ]


def test_adapters_of_a_bf16_base_train_under_a_policy_that_casts() -> None:
    """B12: one compute dtype for base and adapters, whose storage and gradients are fp32."""
    reference = seeded(bf16_base)
    mean_loss(reference, tokens(rows=8)).backward()
    for found in run_on_ranks(2, trained_once, bf16_base, "fsdp", BF16):
        check_gradients(found["gradients"], reference, 0.1)
        assert len(found["units"]) == 5
        assert {g.dtype for g in found["gradients"].values() if g is not None} == {torch.float32}


def with_unused(kind: str) -> dict[str, Any]:
    options = {"find_unused_parameters": True} if kind == "ddp" else {}
    model = parallel(seeded(Unused), kind, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(model, mine(tokens(rows=8))).backward()
        clip_grad_norm_(model, 0.5)
        optimizer.step()
    state = {name: whole(parameter) for name, parameter in unwrap_model(model).named_parameters()}
    return {"gradients": gradients(model), "weights": state}


@KINDS
def test_a_parameter_that_no_forward_reads(kind: str, world: int) -> None:
    """B12: it keeps no gradient, as in one process, and neither hangs nor changes."""
    reference = seeded(Unused)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(reference, tokens(rows=8)).backward()
        clip_grad_norm_(reference, 0.5)
        optimizer.step()
    for found in run_on_ranks(world, with_unused, kind):
        assert_equal(found["gradients"], gradients(reference))
        unused = [name for name in found["gradients"] if name.endswith("unused")]
        assert len(unused) == 2
        assert [found["gradients"][name] for name in unused] == [None, None]
        assert all(
            torch.equal(found["weights"][name], torch.ones_like(found["weights"][name]))
            for name in unused
        )


def adapters_added_late(kind: str) -> list[str]:
    model = with_adapters(parallel(seeded(lambda: MODELS["llama"](False)), kind))
    notes: list[str] = []
    try:
        mean_loss(model, mine(tokens())).backward()
    except RuntimeError as error:
        notes = error.__notes__
    with pytest.raises(ValueError, match=r"lora_A\.default\.weight.* add adapters"):
        torch.optim.AdamW(model.parameters()).step()
    return notes


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4)])
def test_adapters_added_after_sharding_are_refused(kind: str, world: int) -> None:
    """B12: peft sizes them by the shard, and nobody would reduce their gradients."""
    for notes in run_on_ranks(world, adapters_added_late, kind):
        assert len(notes) == (0 if world == 1 else 1)
        assert all("lora_A.default.weight" in note and "add adapters" in note for note in notes)


def adapters_added_late_under_ddp() -> None:
    model = parallel(seeded(lambda: MODELS["llama"](False)), "ddp")
    with_adapters(model.module)
    with pytest.raises(ValueError, match=r"lora_A\.default\.weight.* add adapters"):
        torch.optim.AdamW(model.parameters()).step()


def test_adapters_added_after_ddp_are_refused() -> None:
    """B12: no bucket of DDP holds them."""
    run_on_ranks(2, adapters_added_late_under_ddp)
