"""Whole training runs with experts: biases that follow loads, and runs that go on elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.mesh import DistributedSetup, FSDP2Config, MeshContext, ParallelismSizes
from shardwalk.moe_ep import attach_router_bias_update
from shardwalk.moe_ep.router import find_gates
from shardwalk.parallelizer_core import load_checkpoint, parallelize_model, save_checkpoint
from shardwalk.parallelizer_core.testing import cached, run_on_ranks
from tests.matrix.plain_moe import VOCABULARY, MoEStack

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "fsdp 2": (2, {}),
    "ep 2": (2, {"ep_size": 2}),
    "ep 4": (4, {"ep_size": 4}),
    "ep 2 x shard 2": (4, {"ep_size": 2}),
    "hsdp 2x2, ep 2": (4, {"ep_size": 2, "dp_replicate_size": 2}),
    "tp 2, ep 4": (4, {"tp_size": 2, "ep_size": 4}),
}
ROWS, LENGTH, STEPS = 4, 9, 3
BIASED = {"score_function": "sigmoid", "correction_bias": True, "bias_update_speed": 0.01}


def context(mesh: str, checkpointing: bool | str = False) -> MeshContext:
    sizes = ParallelismSizes(**MESHES[mesh][1])
    made = cached(
        ("moe runs", mesh),
        lambda: DistributedSetup.build("fsdp2", parallelism_sizes=sizes).mesh_context,
    )
    return MeshContext.from_meshes(
        made.device_mesh,
        made.moe_mesh,
        strategy_config=FSDP2Config(mp_policy={"param_dtype": None, "reduce_dtype": None}),
        activation_checkpointing=checkpointing,
    )


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, part: int, of: int
) -> float:
    """One step on this part of the rows, in two micro-batches; its loss."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (2 * ROWS, LENGTH + 1), generator=generator)
    total = 0.0
    for rows in tokens.split(ROWS):
        own = rows.tensor_split(of)[part]
        logits = model(own[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten()) / 2
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def biases(model: nn.Module) -> list[Tensor]:
    found = [gate.e_score_correction_bias for gate in find_gates(model)]
    return [getattr(bias, "to_local", lambda bias=bias: bias)().clone() for bias in found]


def run(model: nn.Module, part: int, of: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attach_router_bias_update(model, optimizer)
    for number in range(STEPS):
        step(model, optimizer, number, part, of)
    return biases(model)


def followed_biases(mesh: str, checkpointing: bool | str) -> list[bool]:
    torch.manual_seed(0)
    whole = MoEStack(**BIASED)
    model = MoEStack(**BIASED)
    model.load_state_dict(whole.state_dict())
    start = biases(whole)
    mesh_context = context(mesh, checkpointing)
    model = parallelize_model(model, mesh_context)
    own = run(model, mesh_context.data_rank, mesh_context.data_world_size)
    expected = run(whole, 0, 1)
    moved = [not torch.equal(before, after) for before, after in zip(start, expected, strict=True)]
    equal = [torch.equal(left, right) for left, right in zip(own, expected, strict=True)]
    return [*moved, *equal]


@pytest.mark.parametrize("checkpointing", [False, "full", "selective"])
@pytest.mark.parametrize("mesh", MESHES)
def test_b20_p2_biases_follow_the_loads_of_all_ranks(mesh: str, checkpointing: Any) -> None:
    """The same bits as one process has after three steps, on every rank."""
    for report in run_on_ranks(MESHES[mesh][0], followed_biases, mesh, checkpointing):
        assert all(report)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def saved_run(mesh: str, folder: str) -> float:
    """The mean loss of the third step."""
    mesh_context = context(mesh)
    torch.manual_seed(0)
    model = parallelize_model(MoEStack(**BIASED), mesh_context)
    optimizer = adamw(model)
    place = (mesh_context.data_rank, mesh_context.data_world_size)
    for number in range(2):
        step(model, optimizer, number, *place)
    save_checkpoint(folder, model, optimizer, step=2)
    return mean(step(model, optimizer, 2, *place))


def resumed_run(mesh: str, folder: str) -> float:
    mesh_context = context(mesh)
    torch.manual_seed(1)
    model = parallelize_model(MoEStack(**BIASED), mesh_context)
    optimizer = adamw(model)
    load_checkpoint(folder, model, optimizer)
    loss = step(model, optimizer, 2, mesh_context.data_rank, mesh_context.data_world_size)
    return mean(loss)


def mean(loss: float) -> float:
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def test_b29_a_run_saved_on_one_ep_size_goes_on_on_any_other(tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = run_on_ranks(2, saved_run, "ep 2", folder)[0]
    for mesh in ("ep 2", "fsdp 2", "ep 4", "ep 2 x shard 2", "tp 2, ep 4"):
        for loss in run_on_ranks(MESHES[mesh][0], resumed_run, mesh, folder):
            assert loss == pytest.approx(expected, rel=1e-6)
