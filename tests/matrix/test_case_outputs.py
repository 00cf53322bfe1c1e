"""Units whose output is a view: torch's sharding warns of them, in-place operations break on them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwalk.parallelizer_core.testing import run_on_ranks
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
