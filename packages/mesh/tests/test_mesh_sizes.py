"""Sizes: the arithmetic, the equation in every refusal, and meshes of any world of a fake group."""

import time
from math import prod
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_ranks import fake_world

from shardwalk.mesh import (
    AxisSizes,
    FSDP2Config,
    MeshContext,
    ParallelismSizes,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_submesh,
)

degree = st.integers(1, 4) | st.sampled_from([6, 8, 16])


@st.composite
def fitting(draw: st.DrawFn) -> tuple[int, dict[str, int]]:
    """A world and sizes that fit it."""
    sizes = {f"{axis}_size": draw(degree) for axis in ("pp", "cp", "tp", "dp_replicate")}
    dp = sizes["dp_replicate_size"] * draw(degree)
    stage = dp * sizes["cp_size"] * sizes["tp_size"]
    world_size = stage * sizes["pp_size"]
    if world_size > 64:
        return 1, {}
    divisors = [ep for ep in range(1, stage + 1) if stage % ep == 0]
    return world_size, {**sizes, "dp_size": dp, "ep_size": draw(st.sampled_from(divisors))}


anything = st.tuples(
    st.integers(1, 64),
    st.fixed_dictionaries(
        {"tp_size": degree, "pp_size": degree, "cp_size": degree, "ep_size": degree},
        optional={"dp_size": degree, "dp_replicate_size": degree},
    ),
)


@settings(max_examples=150, deadline=None)
@given(fitting() | anything, st.integers(0, 63))
def test_any_world_gets_the_promised_mesh_or_an_equation(
    case: tuple[int, dict[str, int]], rank: int
) -> None:
    world_size, sizes = case
    with fake_world(world_size, rank % world_size):
        if fits(world_size, sizes):
            context = MeshContext.build(FSDP2Config(), ParallelismSizes(**sizes))
            check(context, world_size, sizes)
        else:
            with pytest.raises(ValueError, match=r"(world_size|dp) \d+ = .* x "):
                MeshContext.build(FSDP2Config(), ParallelismSizes(**sizes))


def fits(world_size: int, sizes: dict[str, int]) -> bool:
    others = prod(sizes.get(name, 1) for name in ("pp_size", "cp_size", "tp_size"))
    if world_size % others:
        return False
    dp = world_size // others
    stage = world_size // sizes.get("pp_size", 1)
    return (
        sizes.get("dp_size", dp) == dp
        and dp % sizes.get("dp_replicate_size", 1) == 0
        and stage % sizes.get("ep_size", 1) == 0
    )


def check(context: MeshContext, world_size: int, sizes: dict[str, int]) -> None:
    mesh = context.device_mesh
    assert mesh is not None
    pp, cp, tp = (sizes.get(f"{name}_size", 1) for name in ("pp", "cp", "tp"))
    replicas, dp = sizes.get("dp_replicate_size", 1), world_size // (pp * cp * tp)
    assert mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert tuple(mesh.shape) == (pp, replicas, dp // replicas, cp, tp)
    assert mesh.mesh.flatten().tolist() == list(range(world_size))
    found = (context.pp_size, context.dp_size, context.cp_size, context.tp_size)
    assert found == (pp, dp, cp, tp)
    assert (context.dp_replicate_size, context.dp_shard_size) == (replicas, dp // replicas)
    assert context.data_world_size == dp
    rank = dist.get_rank()
    assert context.data_rank == rank // (cp * tp) % dp
    fsdp_mesh = get_fsdp_dp_mesh(mesh)
    shards = dp // replicas * cp
    assert tuple(fsdp_mesh.shape) == ((replicas, shards) if replicas > 1 else (shards,))
    assert fsdp_mesh.get_group(fsdp_mesh.ndim - 1).size() == shards
    stage = rank // (world_size // pp) * (world_size // pp)
    peers = [r for r in range(stage, stage + world_size // pp) if r % tp == rank % tp]
    assert dist.get_process_group_ranks(get_flat_mesh(mesh, "dp_cp").get_group()) == peers
    assert get_submesh(mesh, ("dp_shard", "tp")).shape == (dp // replicas, tp)
    check_moe(context, world_size // pp, sizes.get("ep_size", 1), stage)


def check_moe(context: MeshContext, stage_size: int, ep: int, first_rank: int) -> None:
    assert context.ep_size == ep
    if ep == 1:
        assert context.moe_mesh is None
        return
    moe = context.moe_mesh
    assert moe is not None
    assert moe.mesh.flatten().tolist() == list(range(first_rank, first_rank + stage_size))
    replicas = context.dp_replicate_size or 1
    inside = stage_size // replicas % ep == 0
    assert moe.mesh_dim_names is not None
    assert ("ep_replicate" in moe.mesh_dim_names) == (inside and replicas > 1)
    assert moe.shape[-1] == ep
    assert prod(moe.shape) == stage_size
    if inside:
        group = dist.get_process_group_ranks(moe.get_group("ep"))
        assert len({(rank - first_rank) // (stage_size // replicas) for rank in group}) == 1


REFUSED: list[tuple[int, dict[str, Any], str]] = [
    (8, {"tp_size": 3}, "world_size 8 = pp 1 x dp ? x cp 1 x tp 3"),
    (8, {"tp_size": 2, "dp_size": 3}, "world_size 8 = pp 1 x dp 3 x cp 1 x tp 2"),
    (4, {"dp_size": 2}, "use dp_size=4"),
    (4, {"dp_replicate_size": 3}, "dp ? (dp_replicate 3 x dp_shard ?)"),
    (6, {"dp_size": 6, "dp_replicate_size": 4}, "dp 6 = dp_replicate 4 x dp_shard ?"),
    (8, {"ep_size": 3}, "dp 8 x cp 1 x tp 1 = ep_shard ? x ep 3"),
    (8, {"ep_size": 8, "pp_size": 2}, "world_size 8 = pp 2 x dp ? x cp 1 x tp 1"),
]


@pytest.mark.parametrize(("world_size", "sizes", "words"), REFUSED)
def test_sizes_that_do_not_fit(world_size: int, sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        ParallelismSizes(**sizes).resolve(world_size)
    assert words in str(error.value)


@pytest.mark.parametrize("name", list(ParallelismSizes().to_dict()))
@pytest.mark.parametrize("value", [0, -2, "2", 2.0, True])
def test_sizes_that_are_no_size(name: str, value: Any) -> None:
    """P15: -2, 0, "2" and 2.0 do not mean one."""
    with pytest.raises((ValueError, TypeError), match=f"{name}="):
        ParallelismSizes(**{name: value})


def test_expert_groups_stay_inside_a_replica_where_they_can(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    inside = ParallelismSizes(dp_replicate_size=2, ep_size=4).resolve(8)
    assert (inside.ep_replicate, inside.ep_shard, inside.ep) == (2, 1, 4)
    assert not caplog.records
    across = ParallelismSizes(dp_replicate_size=2, ep_size=8).resolve(8)
    assert (across.ep_replicate, across.ep_shard, across.ep) == (1, 1, 8)
    assert "ep_size=8" in caplog.text
    assert isinstance(across, AxisSizes)
    assert across.world_size == across.stage_size == 8


def test_a_plan_of_thousands_of_ranks_is_quick() -> None:
    with fake_world(4096, 77):
        start = time.perf_counter()
        context = MeshContext.build(
            FSDP2Config(),
            ParallelismSizes(pp_size=4, dp_replicate_size=4, cp_size=2, tp_size=8, ep_size=64),
        )
        assert time.perf_counter() - start < 2
        assert context.device_mesh is not None
        assert context.moe_mesh is not None
        assert tuple(context.device_mesh.shape) == (4, 4, 16, 2, 8)
        assert tuple(context.moe_mesh.shape) == (4, 4, 64)
        assert context.pipeline_axis_kwargs() == {
            "pp_axis_name": "pp",
            "dp_axis_names": ("dp_replicate", "dp_shard_cp"),
            "cp_axis_name": "cp",
            "tp_axis_name": "tp",
            "ep_axis_name": "ep",
            "ep_shard_axis_names": ("ep_replicate", "ep_shard"),
        }
