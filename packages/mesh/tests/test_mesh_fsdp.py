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


def gradients(sizes: dict[str, int], ranks: list[int] | None) -> tuple[tuple[int, ...], float]:
    """Return the shape of the mesh for FSDP2 and the largest error of a gradient on this rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    context = MeshContext.build(FSDP2Config(), ParallelismSizes(**sizes), ranks=ranks)
    mesh = context.device_mesh
    assert mesh is not None
    if not context.is_member:
        return (), 0.0
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


def all_gradients(
    meshes: list[dict[str, int]], ranks: list[int] | None = None
) -> list[tuple[tuple[int, ...], float]]:
    return [gradients(sizes, ranks) for sizes in meshes]


@pytest.mark.parametrize(("world_size", "meshes"), MESHES)
def test_gradients_are_those_of_one_process(world_size: int, meshes: list[dict[str, int]]) -> None:
    for results in run_ranks_cleanly(world_size, all_gradients, meshes):
        for sizes, (shape, error) in zip(meshes, results, strict=True):
            replicas = sizes.get("dp_replicate_size", 1)
            shards = world_size // sizes.get("tp_size", 1) // replicas
            assert shape == ((replicas, shards) if replicas > 1 else (shards,)), sizes
            assert error < 1e-6, sizes


def test_gradients_on_a_part_of_the_ranks_in_another_order() -> None:
    meshes = [{}, {"dp_replicate_size": 2}, {"tp_size": 2}]
    results = run_ranks_cleanly(5, all_gradients, meshes, [3, 0, 4, 1])
    assert results.pop(2) == [((), 0.0)] * 3
    for found in results:
        assert [shape for shape, _ in found] == [(4,), (2, 2), (2,)]
        assert max(error for _, error in found) < 1e-6


def experts(sizes: dict[str, int]) -> tuple[tuple[int, ...], float, int]:
    """Shard grouped experts over ep and the rest; return the error and how many are here."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    context = MeshContext.build(FSDP2Config(), ParallelismSizes(**sizes))
    moe = context.moe_mesh
    assert moe is not None
    full = torch.arange(4 * 6 * 2.0).view(4, 6, 2)
    module = nn.Module()
    weight = distribute_tensor(full, moe["ep"], [Shard(0)], src_data_rank=None)
    module.register_parameter("weight", nn.Parameter(weight))
    names = tuple(name for name in moe.mesh_dim_names or () if name != "ep")
    fully_shard(module, mesh=get_submesh(moe, names), shard_placement_fn=lambda _: Shard(1))
    values = (module.weight.full_tensor() - full).abs().max().item()
    module.unshard()
    return tuple(moe.shape), values, module.weight.to_local().shape[0]


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"ep_size": 2}, (2, 2)),
        ({"ep_size": 4}, (1, 4)),
        ({"ep_size": 2, "dp_replicate_size": 2}, (2, 1, 2)),
        ({"ep_size": 2, "tp_size": 2, "pp_size": 2}, (1, 2)),
    ],
)
def test_experts_on_the_moe_mesh(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    for found in run_ranks_cleanly(4, experts, sizes):
        assert found == (shape, 0.0, 4 // sizes["ep_size"])
