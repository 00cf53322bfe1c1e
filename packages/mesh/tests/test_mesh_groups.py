"""Which process groups a mesh makes, whom they reach, and how they end, over real gloo ranks."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from mesh_ranks import real_groups, run_ranks, run_ranks_cleanly
from torch.distributed.device_mesh import init_device_mesh

from shardwalk.mesh import (
    DDPConfig,
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    ParallelismSizes,
    get_cp_submeshes,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_submesh,
    seed_everything,
)

ALL = (0, 1, 2, 3)


def build(ranks: list[int] | None = None, **sizes: int) -> MeshContext:
    return MeshContext.build(FSDP2Config(), ParallelismSizes(**sizes), ranks=ranks)


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def total(group: dist.ProcessGroup | None) -> int:
    """The sum of the global ranks of a group, by an all-reduce."""
    value = torch.tensor(dist.get_rank())
    dist.all_reduce(value, group=group)
    return int(value)


def groups_by_mesh() -> dict[str, list[tuple[int, ...]]]:
    counts = {}
    build()
    counts["fsdp"] = real_groups()
    build(dp_replicate_size=4)
    MeshContext.build(DDPConfig())
    counts["pure replicas and ddp"] = real_groups()
    build(tp_size=2)
    counts["tp 2"] = real_groups()
    build(tp_size=2)
    build(dp_replicate_size=2)
    build(cp_size=2, ep_size=2)
    counts["the same pairs again"] = real_groups()
    return counts


def test_no_group_for_one_rank_and_none_twice() -> None:
    """P33: plain FSDP2 needs the default group only, tp 2 adds one for dp and one for tp."""
    for rank, counts in enumerate(run_ranks_cleanly(4, groups_by_mesh)):
        assert counts["fsdp"] == [ALL]
        assert counts["pure replicas and ddp"] == [ALL]
        row = (0, 1) if rank < 2 else (2, 3)
        column = (0, 2) if rank % 2 == 0 else (1, 3)
        assert sorted(counts["tp 2"]) == sorted([ALL, row, column])
        assert counts["the same pairs again"] == counts["tp 2"]


def subsets_and_orders() -> dict[str, object]:
    rank = dist.get_rank()
    seen: dict[str, object] = {}
    # Only the members build this one, so that the ranks have different histories afterwards.
    if rank in {1, 3}:
        own = build(ranks=[3, 1], tp_size=2)
        assert own.device_mesh is not None
        seen["own"] = own.data_rank, own.axis_rank("tp"), total(own.device_mesh.get_group("tp"))
        seen["own group"] = ranks_of(own.process_group) if own.process_group else None
    # Each rank builds its half of the job; then all of them build both.
    halves = [[0, 1], [2, 3]]
    mine = build(ranks=halves[rank // 2])
    seen["mine"] = mine.data_rank, mine.data_world_size, total(mine.process_group)
    both = [build(ranks=half, tp_size=2) for half in halves]
    seen["members"] = [context.is_member for context in both]
    seen["sizes"] = [context.tp_size for context in both]
    back = build(ranks=[3, 2, 1, 0], dp_replicate_size=2)
    assert back.device_mesh is not None
    seen["reversed"] = back.data_rank, back.process_group
    shard = get_flat_mesh(back.device_mesh, "dp_shard_cp")
    seen["reversed shard"] = ranks_of(shard.get_group()), shard.get_local_rank()
    seen["reversed dp"] = dist.get_rank(get_flat_mesh(back.device_mesh, "dp").get_group())
    whole = build(cp_size=2)
    assert whole.device_mesh is not None
    seen["whole"] = total(whole.device_mesh.get_group("cp"))
    return seen


def test_meshes_over_a_part_or_another_order_of_the_ranks() -> None:
    results = run_ranks_cleanly(4, subsets_and_orders)
    for rank, seen in enumerate(results):
        half = rank // 2
        assert seen["mine"] == (rank % 2, 2, (1, 5)[half])
        assert seen["members"] == [half == 0, half == 1]
        assert seen["sizes"] == [2, 2]
        assert seen["reversed"] == (3 - rank, None)
        assert seen["reversed shard"] == ([[1, 0], [3, 2]][half], 1 - rank % 2)
        assert seen["reversed dp"] == 3 - rank
        assert seen["whole"] == (1, 5)[half]
    assert results[3]["own"] == (0, 0, 4)
    assert results[1]["own"] == (0, 1, 4)
    assert results[1]["own group"] == [3, 1]


def outsider() -> str:
    context = build(ranks=[0])
    if dist.get_rank() == 0:
        assert context.is_member
        assert total(context.process_group) == 0
        return "inside"
    with pytest.raises(ValueError, match="outside"):
        _ = context.data_rank
    return "outside"


def test_a_rank_outside_the_mesh_says_so() -> None:
    assert run_ranks_cleanly(2, outsider) == ["inside", "outside"]


def skip_one(axis: str, sizes: dict[str, int]) -> None:
    context = MeshContext.build(
        FSDP2Config(), ParallelismSizes(**sizes), timeout_minutes=2 / 60, ranks=None
    )
    mesh = context.moe_mesh if axis == "ep" else context.device_mesh
    assert mesh is not None
    if dist.get_rank() == 0:
        total(get_flat_mesh(mesh, axis).get_group())
    dist.barrier()


@pytest.mark.parametrize(
    ("axis", "sizes"),
    [("tp", {"tp_size": 2}), ("ep", {"ep_size": 2}), ("dp_shard", {}), ("dp_cp", {"cp_size": 2})],
)
def test_a_skipped_collective_ends_within_the_timeout(axis: str, sizes: dict[str, int]) -> None:
    """B50: the timeout of the library holds for every axis group, not for the default one only."""
    results = run_ranks(2, skip_one, axis, sizes, timeout=600)
    assert all(isinstance(result, Exception) for result in results)


def all_timeouts() -> list[float]:
    def timeouts(context: MeshContext) -> set[float]:
        meshes = [m for m in (context.device_mesh, context.moe_mesh) if m is not None]
        axes = [(m, str(axis)) for m in meshes for axis in m.mesh_dim_names or ()]
        assert context.device_mesh is not None
        axes += [(context.device_mesh, name) for name in ("dp", "dp_cp", "dp_shard_cp")]
        groups = [get_flat_mesh(mesh, axis).get_group() for mesh, axis in axes]
        cpu = torch.device("cpu")
        return {
            group._get_backend(cpu).options._timeout.total_seconds()
            for group in groups
            if group.size() > 1
        }

    sizes = ParallelismSizes(tp_size=2, ep_size=2)
    inherited = MeshContext.build(FSDP2Config(), sizes)
    own = MeshContext.build(FSDP2Config(), sizes, timeout_minutes=0.5)
    return [*timeouts(inherited), *timeouts(own)]


def test_every_axis_group_has_the_timeout_of_the_default_group_or_its_own() -> None:
    assert run_ranks_cleanly(4, all_timeouts) == [[12.0, 30.0]] * 4


def users_meshes() -> dict[str, object]:
    seen: dict[str, object] = {}
    rank = dist.get_rank()
    for shape, names in [
        ((4,), ("dp",)),
        ((4,), ("dp_shard",)),
        ((4,), ("tp",)),
        ((2, 2), ("cp", "tp")),
        ((2, 2), ("dp_shard", "tp")),
        ((2, 1, 2), ("dp_replicate", "dp_shard", "tp")),
        ((2, 2), ("dp_shard", "cp")),
        ((2, 2), ("dp_replicate", "dp_shard_cp")),
    ]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        context = MeshContext.from_meshes(mesh)
        fsdp_mesh = get_fsdp_dp_mesh(mesh)
        seen[",".join(names)] = (
            context.data_rank,
            context.dp_size,
            tuple(fsdp_mesh.shape),
            [ranks_of(group) for group in fsdp_mesh.get_all_groups()],
            total(get_flat_mesh(mesh, "dp_cp").get_group()),
        )
    user = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    flat = user._flatten("dp_shard_cp")
    seen["flattened by the user"] = get_flat_mesh(user, "dp_shard_cp") is flat
    seen["slice"] = get_submesh(user, ("cp",)) == user["cp"]
    assert rank in ranks_of(flat.get_group())
    return seen


def test_meshes_that_the_user_built() -> None:
    results = run_ranks_cleanly(4, users_meshes)
    for rank, seen in enumerate(results):
        row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        everyone = list(ALL)
        assert seen["dp"] == (rank, 4, (4,), [everyone], 6)
        assert seen["dp_shard"] == (rank, 4, (4,), [everyone], 6)
        assert seen["tp"] == (0, 1, (1,), [[rank]], rank)
        assert seen["cp,tp"] == (0, 1, (2,), [column], sum(column))
        assert seen["dp_shard,tp"] == (rank // 2, 2, (2,), [column], sum(column))
        assert seen["dp_replicate,dp_shard,tp"] == (
            *(rank // 2, 2, (2, 1)),
            [column, [rank]],
            sum(column),
        )
        assert seen["dp_shard,cp"] == (rank // 2, 2, (4,), [everyone], 6)
        assert seen["dp_replicate,dp_shard_cp"] == (rank, 4, (2, 2), [column, row], 6)
        assert seen["flattened by the user"]
        assert seen["slice"]


def ring_and_ulysses() -> list[list[int]]:
    context = MeshContext.build(FSDP2Config(), ParallelismSizes(cp_size=4), cp_ring_degree=2)
    assert context.device_mesh is not None
    ring, ulysses = get_cp_submeshes(context.device_mesh, context.cp_ring_degree)
    _, whole = get_cp_submeshes(context.device_mesh)
    return [ranks_of(mesh.get_group()) for mesh in (ring, ulysses, whole)]


def test_the_two_views_of_the_cp_axis() -> None:
    for rank, (ring, ulysses, whole) in enumerate(run_ranks_cleanly(4, ring_and_ulysses)):
        assert ring == [rank % 2, rank % 2 + 2]
        assert ulysses == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert whole == list(ALL)


def bad_sizes() -> list[str]:
    builds: list[Callable[[], object]] = [
        lambda: build(tp_size=3),
        lambda: build(dp_size=2),
        lambda: build(dp_size=3),
        lambda: build(dp_size=1, pp_size=2),
        lambda: build(dp_replicate_size=3),
        lambda: build(ep_size=3),
        lambda: MeshContext.build(DDPConfig(), ParallelismSizes(dp_size=7)),
        lambda: DistributedSetup.build(world_size=2),
    ]
    before = len(real_groups())
    messages = []
    for attempt in builds:
        with pytest.raises(ValueError) as error:
            attempt()
        messages.append(str(error.value))
    assert len(real_groups()) == before
    dist.barrier()
    return messages


def test_bad_sizes_are_refused_alike_on_every_rank_before_any_group() -> None:
    """P16 and P22: a dp_size that does not fill the world never builds a partial mesh."""
    first, *others = run_ranks_cleanly(4, bad_sizes)
    assert all(messages == first for messages in others)
    assert "world_size 4 = pp 1 x dp ? x cp 1 x tp 3" in first[0]
    assert "world_size 4 = pp 1 x dp 2 x cp 1 x tp 1" in first[1]
    assert "world_size 4 = pp 2 x dp 1 x cp 1 x tp 1" in first[3]


def seeds() -> tuple[int, float, float]:
    context = build(tp_size=2)
    used = seed_everything(context, 7)
    import random

    return used, torch.rand(()).item(), random.random()


def test_seeds_agree_over_tp_and_differ_over_dp() -> None:
    results = run_ranks_cleanly(4, seeds)
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert all(a != b for a, b in zip(results[0], results[2], strict=True))
