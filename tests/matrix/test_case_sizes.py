"""Sizes that fit no mesh, timeouts that reach one group, options that are not heard."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwalk.mesh import (
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    ParallelismSizes,
    get_flat_mesh,
)
from shardwalk.parallelizer_core import clip_grad_norm_, parallelize_model
from shardwalk.parallelizer_core.testing import RankError, RankPool, run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives
from tests.matrix.case_models import context, mean_loss, mine, parallel, seeded, tokens


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


UNFIT: list[tuple[dict[str, int], str]] = [
    ({"tp_size": 3}, "tp 3"),
    ({"tp_size": 2, "cp_size": 4}, "cp 4 x tp 2"),
    ({"tp_size": 8}, "tp 8"),
    ({"pp_size": 3}, "pp 3"),
    ({"pp_size": 2, "dp_size": 1}, "pp 2 x dp 1"),
    ({"dp_size": 3}, "dp 3"),
    ({"dp_size": 2}, "dp 2"),
    ({"dp_size": 7}, "dp 7"),
    ({"dp_replicate_size": 3}, "dp_replicate 3"),
    ({"dp_replicate_size": 8}, "dp_replicate 8"),
    ({"dp_size": 4, "dp_replicate_size": 3}, "dp_replicate 3"),
    ({"dp_size": 2, "tp_size": 4}, "dp 2 x cp 1 x tp 4"),
    ({"ep_size": 3}, "ep 3"),
]


def unfit() -> list[str]:
    messages = []
    before = groups()
    for sizes, words in UNFIT:
        for strategy in ("fsdp2", "ddp", "megatron_fsdp"):
            with CountCollectives() as counted, pytest.raises(ValueError) as error:
                DistributedSetup.build(strategy, ParallelismSizes(**sizes))
            assert not counted.calls
            refused = "is not supported" in str(error.value)  # a size the strategy cannot do at all
            assert words in str(error.value) or (refused and strategy != "fsdp2"), error.value
            assert refused or "4" in str(error.value)
            messages.append(str(error.value))
    assert groups() == before
    return messages


def test_sizes_that_do_not_fit_are_refused_with_all_their_numbers() -> None:
    """B52, P16, P22: alike on every rank and under every strategy, before any group is made."""
    first, *others = run_on_ranks(4, unfit)
    assert all(messages == first for messages in others)


AXES = ["dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size"]


@pytest.mark.parametrize("value", [0, -1, -2, "2", "", 2.0, 1.5, True, False, [2], "None"])
@pytest.mark.parametrize("axis", AXES)
def test_what_is_no_size_is_no_size(axis: str, value: Any) -> None:
    """B52, P15: none of them means one, or the size that is left."""
    with pytest.raises((ValueError, TypeError), match=axis):
        ParallelismSizes(**{axis: value})
    with pytest.raises((ValueError, TypeError), match=axis):
        DistributedSetup.build("fsdp2", {axis: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", [axis for axis in AXES if not axis.startswith("dp")])
def test_only_data_parallel_sizes_are_worked_out(axis: str) -> None:
    """B52: None is a size to work out for dp, and nothing for the others."""
    ParallelismSizes(dp_size=None, dp_replicate_size=None)
    with pytest.raises((ValueError, TypeError), match=axis):
        ParallelismSizes(**{axis: None})


def inferred() -> dict[tuple[int, ...], tuple[int | None, ...]]:
    found: dict[tuple[int, ...], tuple[int | None, ...]] = {}
    for pp, cp, tp in itertools.product((1, 2, 4), repeat=3):
        if pp * cp * tp > 4:
            continue
        sizes = ParallelismSizes(pp_size=pp, cp_size=cp, tp_size=tp)
        mesh = MeshContext.build(FSDP2Config(), sizes)
        found[pp, cp, tp] = (mesh.dp_size, mesh.pp_size, mesh.cp_size, mesh.tp_size)
    return found


def test_the_data_parallel_size_is_what_is_left() -> None:
    """B52: for every product that divides the world."""
    for found in run_on_ranks(4, inferred):
        assert found == {(p, c, t): (4 // (p * c * t), p, c, t) for p, c, t in found}
        assert len(found) == 10


def timeouts(minutes: float) -> dict[str, set[float]]:
    found: dict[str, set[float]] = {}
    for sizes in (
        {"pp_size": 2, "dp_replicate_size": 2},
        {"cp_size": 2, "tp_size": 2},
        {"dp_replicate_size": 2, "ep_size": 2},
        {"ep_size": 4},
        {},
    ):
        made = MeshContext.build(FSDP2Config(), ParallelismSizes(**sizes), timeout_minutes=minutes)
        for mesh in (made.device_mesh, made.moe_mesh):
            if mesh is None:
                continue
            flat = ("dp", "dp_cp", "dp_shard_cp") if mesh is made.device_mesh else ()
            for axis in (*(mesh.mesh_dim_names or ()), *flat):
                group = get_flat_mesh(mesh, axis).get_group()
                if group.size() > 1:
                    options = group._get_backend(torch.device("cpu")).options
                    found.setdefault(axis, set()).add(options._timeout.total_seconds())
    return found


def test_the_timeout_reaches_every_group() -> None:
    """B50: of every axis and every flattened one, dense and expert meshes."""
    for found in run_on_ranks(4, timeouts, 0.35):
        assert {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "dp", "dp_cp"} <= found.keys()
        assert set.union(*found.values()) == {21.0}


def peer_never_comes(replicas: int | None) -> None:
    sizes = ParallelismSizes(dp_replicate_size=replicas)
    policy = FSDP2Config(mp_policy={"param_dtype": None})
    setup = DistributedSetup.build(policy, sizes, timeout_minutes=2 / 60)
    model = parallelize_model(seeded(), setup.mesh_context)
    loss = mean_loss(model, mine(tokens()))
    if dist.get_rank() == 1:
        time.sleep(9)
        return
    loss.backward()


@pytest.mark.parametrize("replicas", [None, 2])
def test_a_step_without_its_peer_ends_in_an_error(replicas: int | None) -> None:
    """B50: after the two seconds that the setup was given, not the half hour of the default."""
    start = time.monotonic()
    with RankPool(2, timeout=40, collective_timeout=35) as pool:
        with pytest.raises(RankError) as error:
            pool.run(peer_never_comes, replicas)
        assert "imed out" in str(error.value) or "exit" in str(error.value)
    assert time.monotonic() - start < 20


def groups_of_a_step(kind: str) -> tuple[int, int]:
    made = context(kind)
    before = groups()
    model = parallelize_model(seeded(), made)
    mean_loss(model, mine(tokens())).backward()
    clip_grad_norm_(model, 1.0)
    return before, groups()


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4), ("ddp", 2)])
def test_a_step_makes_no_further_group(kind: str, world: int) -> None:
    """P33: what the mesh made is enough for sharding, gradients and clipping."""
    assert all(before == after for before, after in run_on_ranks(world, groups_of_a_step, kind))


def options_on_one_rank() -> None:
    for option, value in {
        "tp_plan": {"layers.0.up": "colwise"},
        "autocast_dtype": torch.float64,
        "multimodal": {"frozen_sharding": "per_layer"},
    }.items():
        named = option.replace("multimodal", "frozen_sharding")
        with pytest.raises((ValueError, TypeError), match=named):
            parallel(seeded(), **{option: value})


@pytest.mark.parametrize("world", [1, 2])
def test_no_option_is_dropped_on_one_rank(world: int) -> None:
    """P13: what two ranks refuse, one refuses too."""
    run_on_ranks(world, options_on_one_rank)
