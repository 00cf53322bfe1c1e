"""Modules that some ranks or some steps skip: towers without an image, unused parts under DDP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from shardwalk.parallelizer_core import check_unit_order, sync_gradients_on_last
from shardwalk.parallelizer_core.testing import TinyDecoder, cached, run_on_ranks
from tests.matrix.case_models import (
    assert_equal,
    gradients,
    parallel,
    seeded,
    tokens,
    weights,
)

WIDTH = 18


@dataclass(frozen=True)
class Plan:
    """A tower and what is done about ranks without an image.

    `frozen` names what does not train, `remedy` is ``skip``, ``empty`` (they run it on zero rows)
    or ``unused`` (they skip it, and the root reduces unused parameters as zeros).
    """

    stack: bool
    frozen: tuple[str, ...]
    remedy: str


class Vision(nn.Module):
    def __init__(self, stack: bool) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH, bias=False))]
        parts.append(nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH, bias=False)))
        self.first, self.last = parts
        if stack:
            del self.first, self.last
            self.blocks = nn.ModuleList(parts)

    def parts(self) -> Iterator[nn.Module]:
        return iter(self.blocks if hasattr(self, "blocks") else (self.first, self.last))

    def forward(self, image: Tensor) -> Tensor:
        for part in self.parts():
            image = image + part(image)
        return image


class VisionLanguage(TinyDecoder):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.empty = plan.remedy == "empty"
        self.vision_tower = Vision(plan.stack)
        self.multi_modal_projector = nn.Linear(WIDTH, WIDTH, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(plan.frozen))

    def forward(self, input_ids: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if image is not None:
            x = x + self.multi_modal_projector(self.vision_tower(image))
        elif self.empty:
            x = x + self.multi_modal_projector(self.vision_tower(x[:0].detach())).sum() * 0
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.head(self.norm(x))


TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
FIRST = ("vision_tower.first", "vision_tower.blocks.0")
PLANS = {
    "frozen": Plan(False, (TOWER, PROJECTOR), "skip"),
    "frozen, of blocks": Plan(True, (TOWER, PROJECTOR), "skip"),
    "frozen behind a trainable projector": Plan(True, (TOWER,), "unused"),
    "trainable": Plan(False, ("nothing",), "unused"),
    "partly frozen": Plan(False, FIRST, "unused"),
    "trainable, of blocks": Plan(True, ("nothing",), "empty"),
    "partly frozen, of blocks": Plan(True, FIRST, "empty"),
}


def has_image(rank: int, step: int) -> bool:
    return (rank + step) % 2 == 0


def rank_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    ids = tokens(rows=2, seed=10 * step + rank)
    generator = torch.Generator().manual_seed(step)
    image = torch.randn(1, 8, WIDTH, generator=generator) if has_image(rank, step) else None
    logits = model(ids, image)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def alternating(kind: str, plan: Plan) -> tuple[list[dict[str, Tensor | None]], dict[str, Tensor]]:
    options: dict[str, Any] = {"find_unused_parameters": True} if kind == "ddp" else {}
    model = parallel(seeded(VisionLanguage, plan=plan), kind, **options)
    if plan.remedy == "unused" and isinstance(model, FSDPModule):
        model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        rank_loss(model, dist.get_rank(), step).backward()
        found.append(gradients(model))
        optimizer.step()
    return found, weights(model)


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4), ("ddp", 2)])
@pytest.mark.parametrize("name", PLANS)
def test_ranks_without_an_image(name: str, kind: str, world: int) -> None:
    """B44, B59: their share counts as zero; a frozen tower has no gradients; nothing waits."""
    plan = PLANS[name]
    model = seeded(VisionLanguage, plan=plan)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(world):
            (rank_loss(model, rank, step) / world).backward()
        expected.append(gradients(model))
        optimizer.step()
    for found, trained in run_on_ranks(world, alternating, kind, plan, timeout=20):
        for grads, wanted in zip(found, expected, strict=True):
            assert_equal(grads, wanted)
            frozen = [grads[n] for n in grads if n.startswith(plan.frozen)]
            assert all(grad is None for grad in frozen)
        assert_equal(trained, weights(model))


def skipped_units() -> str:
    plan = Plan(True, ("nothing",), "skip")
    model = parallel(seeded(VisionLanguage, plan=plan))
    with check_unit_order(model), pytest.raises(RuntimeError) as error:
        rank_loss(model, dist.get_rank(), 0)
    return str(error.value)


def test_a_trainable_tower_of_blocks_that_a_rank_skips_is_named() -> None:
    """B44: where nothing of the above holds, the debug mode says which unit and which rank."""
    first, second = run_on_ranks(2, skipped_units)
    assert first == second
    assert "rank 0: vision_tower.blocks.0" in first
    assert "rank 1: layers.0" in first


class Sometimes(nn.Module):
    """Tied tables, a frozen part, and a part that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.extra = nn.Linear(6, 6)
        self.head = nn.Linear(6, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, with_extra: bool) -> Tensor:
        x = self.frozen(self.embed(ids)).tanh()
        return self.head(self.extra(x) if with_extra else x)


# Which micro-batches of which steps run the extra part.
USES = {
    "one step without it": [[True], [False], [True]],
    "one micro-batch without it": [[True, False], [False, True], [True, True]],
    "a step of micro-batches without it": [[True, True], [False, False], [False, True]],
}


def steps_of(model: nn.Module, uses: list[list[bool]], rank: int, ranks: int) -> list[Any]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step, parts in enumerate(uses):
        optimizer.zero_grad()
        rows = tokens(rows=4 * len(parts), seed=step).split(4)
        batches = [
            (part.tensor_split(ranks)[rank], use) for part, use in zip(rows, parts, strict=True)
        ]
        for ids, use in sync_gradients_on_last(model, batches):
            (model(ids, use).square().mean() / len(parts)).backward()
        found.append(gradients(model))
        optimizer.step()
    return [found, weights(model)]


def ddp_steps(name: str, **options: Any) -> list[Any]:
    model = parallel(seeded(Sometimes), "ddp", **options)
    return steps_of(model, USES[name], dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("views", [False, True], ids=["copies", "bucket views"])
@pytest.mark.parametrize("name", USES)
def test_ddp_with_a_part_that_a_step_leaves_out(name: str, views: bool) -> None:
    """B59: tied, frozen and unused parameters, accumulated without communication in between."""
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    expected, trained = steps_of(seeded(Sometimes), USES[name], 0, 1)
    for found, after in run_on_ranks(2, ddp_steps, name, **options):
        for grads, wanted in zip(found, expected, strict=True):
            zeros = {
                n: g if wanted[n] is not None or g is None or g.any() else None
                for n, g in grads.items()
            }
            assert_equal(zeros, wanted)
        assert_equal(after, trained)


def split_by_hand(kind: str) -> str:
    model = seeded(TinyDecoder)
    mesh = cached("split by hand", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    with pytest.raises(ValueError, match=r"layers\.0\.gate\.weight.*tp") as error:
        parallel(model, kind)
    return str(error.value)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_model_that_was_split_by_hand_is_refused(kind: str) -> None:
    """B59: naming the parameter and the axis, before anything is touched."""
    assert len(set(run_on_ranks(2, split_by_hand, kind))) == 1
