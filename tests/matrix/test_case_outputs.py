"""Units whose output is a view: torch's sharding warns of them, in-place operations break on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwalk.parallelizer_core.testing import run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives
from tests.matrix.case_models import assert_equal, gradients, mine, parallel, seeded


class InPlace(nn.Module):
    """Blocks and a model that end in a linear with a bias, called on three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        return self.head(x)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    output += 1
    return output.square().mean()


def in_place(kind: str) -> dict[str, Tensor | None]:
    model = parallel(seeded(InPlace), kind)
    loss_of(model, mine(torch.linspace(-1.0, 1.0, 4 * 3 * 4).view(4, 3, 4))).backward()
    return gradients(model)


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4)])
def test_outputs_may_be_changed_in_place(kind: str, world: int) -> None:
    """Without a warning (which is an error in these ranks), to the gradients of one process."""
    reference = seeded(InPlace)
    loss_of(reference, torch.linspace(-1.0, 1.0, 4 * 3 * 4).view(4, 3, 4)).backward()
    for found in run_on_ranks(world, in_place, kind):
        assert_equal(found, gradients(reference))


@dataclass(frozen=True)
class Found:
    """What a model gives, as a dataclass that nobody registered as a tree."""

    value: Tensor


class Named(nn.Module):
    """A norm in the root unit, whose output comes as a dataclass or in a tuple."""

    def __init__(self, as_dataclass: bool) -> None:
        super().__init__()
        self.as_dataclass = as_dataclass
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Found | tuple[Tensor]:
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return Found(x) if self.as_dataclass else (x,)


def gathers_of_a_step(as_dataclass: bool) -> int:
    model = parallel(seeded(partial(Named, as_dataclass)), "fsdp")
    with CountCollectives() as counted:
        output = model(torch.ones(2, 4))
        (output.value if as_dataclass else output[0]).square().sum().backward()
    return counted.calls["_allgather_base_"]


def test_a_dataclass_keeps_the_root_gathered_for_its_backward_as_a_tuple_does() -> None:
    [found, *_], [plain, *_] = (run_on_ranks(2, gathers_of_a_step, each) for each in (True, False))
    assert found == plain > 0
