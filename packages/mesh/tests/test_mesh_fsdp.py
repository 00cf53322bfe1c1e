"""FSDP2 on the data-parallel mesh gives one-process gradients for every combination of axes."""

import copy

import pytest
import torch
from mesh_ranks import run_ranks_cleanly
from torch import nn

from shardwalk.mesh import (
    FSDP2Config,
    MeshContext,
    ParallelismSizes,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_submesh,
)

MESHES = [
    (4, [{}, {"dp_replicate_size": 2}, {"dp_replicate_size": 4}, {"cp_size": 2}]),
    (4, [{"cp_size": 2, "dp_replicate_size": 2}, {"tp_size": 2, "cp_size": 2}]),
    (4, [{"tp_size": 2}, {"tp_size": 2, "dp_replicate_size": 2}, {"tp_size": 4}]),
    (8, [{"dp_replicate_size": 2, "cp_size": 2}, {"dp_replicate_size": 2, "tp_size": 2}]),
]


def toy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def gradients(sizes: dict[str, int]) -> tuple[tuple[int, ...], float]:
    """Return the shape of the mesh for FSDP2 and the largest error of a gradient on this rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    context = MeshContext.build(FSDP2Config(), ParallelismSizes(**sizes))
    mesh = context.device_mesh
    assert mesh is not None
    shares = get_flat_mesh(mesh, "dp_cp")
    torch.manual_seed(1)
    batch = torch.randn(shares.size(), 3, 6)

    reference = toy()
    reference(batch).square().mean().backward()
    model = copy.deepcopy(toy())
    if context.tp_size > 1:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, get_submesh(mesh, "tp"), plan)
    fsdp_mesh = get_fsdp_dp_mesh(mesh)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=fsdp_mesh)
    model(batch[shares.get_local_rank()]).square().mean().backward()

    error = 0.0
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        assert theirs.grad is not None
        error = max(error, (ours.grad.full_tensor() - theirs.grad).abs().max().item())
    return tuple(fsdp_mesh.shape), error


def all_gradients(meshes: list[dict[str, int]]) -> list[tuple[tuple[int, ...], float]]:
    return [gradients(sizes) for sizes in meshes]


@pytest.mark.parametrize(("world_size", "meshes"), MESHES)
def test_gradients_are_those_of_one_process(world_size: int, meshes: list[dict[str, int]]) -> None:
    for results in run_ranks_cleanly(world_size, all_gradients, meshes):
        for sizes, (shape, error) in zip(meshes, results, strict=True):
            replicas = sizes.get("dp_replicate_size", 1)
            shards = world_size // sizes.get("tp_size", 1) // replicas
            assert shape == ((replicas, shards) if replicas > 1 else (shards,)), sizes
            assert error < 1e-6, sizes
