"""Optimizer steps that come out smaller, or leave a part of a shard untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.testing import run_on_ranks
from tests.matrix.case_models import mine, parallel, seeded, weights


class Odd(nn.Module):
    """No size divides by the number of ranks, and some are smaller than it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in [(5, 9), (9, 3), (3, 1), (1, 5)])
        self.scale = nn.Parameter(torch.ones(1, 7, 5))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scalar
        return x[:, None] * self.scale[0] * self.one


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "amsgrad": partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
}


def given_gradients(model: nn.Module) -> dict[str, Tensor]:
    """A gradient for every parameter, no element of it zero."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, parameter in model.named_parameters():
        sign = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
        found[name] = sign * (0.1 + torch.rand(parameter.shape, generator=generator))
    return found


def stepped(model: nn.Module, make: Optimizer, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Three steps on given gradients."""
    before = weights(model)
    optimizer = make(model.parameters())
    for step in range(3):
        for name, parameter in unwrap_model(model).named_parameters():
            value = values[name].reshape(parameter.shape) * (step + 1)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.grad = distribute_tensor(value, mesh, placements, src_data_rank=None)
            else:
                parameter.grad = value
        optimizer.step()
    return {name: after - before[name] for name, after in weights(model).items()}


def updates(kind: str) -> dict[str, dict[str, Tensor]]:
    values = given_gradients(seeded(Odd))
    return {
        name: stepped(parallel(seeded(Odd), kind), make, values)
        for name, make in OPTIMIZERS.items()
    }


@pytest.mark.parametrize(
    ("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("ddp", 2)]
)
def test_a_step_changes_every_element_as_in_one_process(kind: str, world: int) -> None:
    """B41: on the same gradients, whatever the shards' sizes, empty ones included."""
    values = given_gradients(seeded(Odd))
    results = run_on_ranks(world, updates, kind)
    for name, make in OPTIMIZERS.items():
        expected = stepped(seeded(Odd), make, values)
        for found in results:
            for parameter, delta in expected.items():
                change = found[name][parameter].reshape(delta.shape)
                assert bool((change != 0).all()), (name, parameter)
                torch.testing.assert_close(change, delta, rtol=1e-6, atol=1e-6)


def trained(kind: str, make: Any) -> dict[str, Tensor]:
    model = parallel(seeded(Odd), kind)
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(12, 5, generator=generator)
        model(mine(x)).square().mean().backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("ddp", 2)])
def test_three_steps_on_own_gradients(kind: str, world: int) -> None:
    """B41: the scalar and the row that one rank holds alone are stepped as well."""
    make = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)
    reference = seeded(Odd)
    optimizer = make(reference.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        reference(torch.randn(12, 5, generator=generator)).square().mean().backward()
        optimizer.step()
    for found in run_on_ranks(world, trained, kind, make):
        for name, value in weights(reference).items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
