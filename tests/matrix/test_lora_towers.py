"""Adapters on a frozen model that sees: the tower stays frozen, and ranks may be text only."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwalk.mesh import DDPConfig, DistributedSetup, FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core import (
    TokenNormalizer,
    clip_grad_norm_,
    describe_units,
    load_checkpoint,
    parallelize_model,
    save_checkpoint,
)
from shardwalk.parallelizer_core.testing import ParityCase, assert_parity, run_on_ranks
from shardwalk.parallelizer_core.testing.parity_case import count_labels, share_of_rows
from shardwalk.parallelizer_core.testing.parity_subject import Subject
from tests.matrix.case_models import FULL, assert_equal, seeded, weights
from tests.matrix.lora_models import with_adapters
from tests.matrix.test_multimodal import ALTERNATING
from tests.matrix.tiny_multimodal import KINDS, MediaBatches, MediaLosses
from tests.matrix.tiny_transformers import normal_weights

TOWER = KINDS["llava"].tower
TARGETS = ["q_proj", "v_proj", "linear_1"]  # of the tower, the text model and the projector


def adapted(projector: bool = False) -> Any:
    """LoRA everywhere; only that of the text model trains, and of the projector if asked."""
    model = with_adapters(KINDS["llava"].make(), target_modules=TARGETS)
    freeze_tower(model)
    if not projector:
        model.get_base_model().model.multi_modal_projector.requires_grad_(False)
    return model


def freeze_tower(model: nn.Module) -> None:
    """What a user gives as `reapply_trainability`; peft makes every adapter trainable."""
    for name, module in model.named_modules():
        if name.endswith(TOWER):
            module.requires_grad_(False)


def refreezing(model: nn.Module, setup: Any) -> nn.Module:
    """Start with a trainable tower, as after peft, and freeze it by the callback alone."""
    for name, parameter in model.named_parameters():
        if TOWER in name and "lora_" in name:
            parameter.requires_grad_(True)
    setup.mesh_context.reapply_trainability = freeze_tower
    model = parallelize_model(model, setup.mesh_context)
    if isinstance(setup.strategy_config, FSDP2Config):
        names = [unit.name for unit in describe_units(model)]
        assert not any(name.endswith("_projector") or TOWER in name for name in names), names
        base = model.get_base_model()  # type: ignore[operator]
        assert isinstance(base, FSDPModule)
        base.set_reduce_scatter_unused_params(True)
    return model


@pytest.mark.parametrize(
    ("kind", "sharding", "mode", "projector"),
    [
        ("fsdp", "root", "full", False),
        ("fsdp", "replicate", "selective", True),
        ("hsdp", "root", "selective", True),
        ("hsdp", "replicate", False, False),
        ("ddp", "root", "full", True),
    ],
)
def test_adapters_train_beside_a_tower_that_is_frozen_again(
    kind: str, sharding: str, mode: Any, projector: bool
) -> None:
    """Ranks skip the tower, and those adapters of the projector that the root unit holds."""
    sizes = ParallelismSizes(dp_replicate_size=2 if kind == "hsdp" else None)
    options: dict[str, Any] = {"activation_checkpointing": mode}
    strategy: Any = FSDP2Config(mp_policy=FULL, multimodal={"frozen_sharding": sharding}, **options)
    if kind == "ddp":
        strategy = DDPConfig(find_unused_parameters=True, **options)
    assert_parity(
        ParityCase(
            model=partial(adapted, projector),
            batches=MediaBatches("llava", ALTERNATING[:2]),
            token_losses=MediaLosses("llava"),
            init=normal_weights,
        ),
        world_size=4 if kind == "hsdp" else 2,
        parallelism_sizes=sizes,
        strategy=strategy,
        optimizers=("sgd",),
        steps=3,
        subject=Subject(parallelize=refreezing),
    )


BATCHES, LOSSES = MediaBatches("llava", ALTERNATING[:2]), MediaLosses("llava")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def train(model: nn.Module, optimizer: Any, setup: Any, steps: range) -> None:
    ranks = dist.get_world_size() if setup is not None else 1
    for step in steps:
        (rows,) = BATCHES(step)
        mine = share_of_rows(rows, dist.get_rank() if setup else 0, ranks, torch.device("cpu"))
        losses = LOSSES(model, mine)
        if setup is None:
            loss = losses.sum() / count_labels(rows)
        else:
            loss = TokenNormalizer(setup.mesh_context, [count_labels(mine)])(losses)
        loss.backward()
        clip_grad_norm_(model, 0.3)
        optimizer.step()
        optimizer.zero_grad()


def part_of_a_run(
    folder: Path, replicas: int | None, sharding: str, mode: str, steps: range
) -> dict[str, Tensor]:
    setup = DistributedSetup.build(
        FSDP2Config(mp_policy=FULL, multimodal={"frozen_sharding": sharding}),
        parallelism_sizes=ParallelismSizes(dp_replicate_size=replicas),
        activation_checkpointing=mode,
    )
    model = refreezing(seeded(partial(adapted, True)), setup)
    optimizer = optimizer_of(model)
    if steps.start:
        assert load_checkpoint(folder, model, optimizer).step == steps.start
    train(model, optimizer, setup, steps)
    save_checkpoint(folder, model, optimizer, step=steps.stop)
    return weights(model)


def test_a_run_goes_on_with_another_placement_of_the_tower_and_on_another_mesh(
    tmp_path: Path,
) -> None:
    """B13: adapters, their moments and the frozen rest, from two ranks to four."""
    model = seeded(partial(adapted, True))
    train(model, optimizer_of(model), None, range(4))
    run_on_ranks(2, part_of_a_run, tmp_path, None, "replicate", "full", range(2))
    for found in run_on_ranks(4, part_of_a_run, tmp_path, 2, "root", "selective", range(2, 4)):
        assert_equal(found, weights(model))
