"""MeshContext and DistributedSetup: one checkpointing setting, kept policies, strategies' limits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh_ranks import fake_world
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from shardwalk.mesh import (
    DDPConfig,
    DistributedSetup,
    FSDP2Config,
    MegatronFSDPConfig,
    MeshContext,
    MoEParallelizerConfig,
    ParallelismSizes,
    PipelineConfig,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_submesh,
    seed_everything,
)
from shardwalk.mesh.strategies import check_offload


def test_without_a_mesh_there_is_one_rank() -> None:
    context = MeshContext()
    ones = dict.fromkeys(("tp_size", "pp_size", "cp_size", "ep_size"), 1)
    assert context.sizes_by_name() == {"dp_size": None, "dp_replicate_size": None, **ones}
    assert (context.dp_shard_size, context.data_rank, context.data_world_size) == (1, 0, 1)
    assert context.is_member
    assert not context.pp_enabled
    assert context._dp_axis_names() == ("dp_shard_cp",)
    unused = ("pp_axis_name", "cp_axis_name", "tp_axis_name", "ep_axis_name", "ep_shard_axis_names")
    assert context.pipeline_axis_kwargs() == {
        "dp_axis_names": ("dp_shard_cp",),
        **dict.fromkeys(unused),
    }


@pytest.mark.parametrize(
    ("strategy", "context", "mode"),
    [
        (False, False, False),
        (True, False, "full"),
        (False, "selective", "selective"),
        ("full", True, "full"),
    ],
)
@pytest.mark.parametrize("config", [FSDP2Config, DDPConfig])
def test_checkpointing_is_one_setting(config: Any, strategy: Any, context: Any, mode: Any) -> None:
    """P11: what one place asks for holds for every strategy."""
    strategy_config = config(activation_checkpointing=strategy)
    found = MeshContext(strategy_config=strategy_config, activation_checkpointing=context)
    assert found.activation_checkpointing == mode
    with fake_world(2):
        setup = DistributedSetup.build(strategy_config, activation_checkpointing=context)
        assert setup.activation_checkpointing == mode
        assert setup.mesh_context.activation_checkpointing == mode


def test_two_different_checkpointing_modes_are_an_error() -> None:
    selective = FSDP2Config(activation_checkpointing="selective")
    with pytest.raises(ValueError, match="strategy_config: 'selective'"):
        MeshContext(strategy_config=selective, activation_checkpointing=True)
    context = MeshContext(strategy_config=selective)
    with pytest.raises(ValueError, match="setup: 'full', mesh_context: 'selective'"):
        DistributedSetup(context, activation_checkpointing="full")
    with pytest.raises(ValueError, match="did you mean 'selective'"):
        MeshContext(activation_checkpointing="selectve")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'selective'"):
        context.activation_checkpointing = "selectve"  # type: ignore[assignment]


def test_a_setup_keeps_the_policies_of_its_context() -> None:
    """P17: a checkpointing mode given to the setup does not replace the strategy by None."""
    ddp, moe = DDPConfig(), MoEParallelizerConfig()
    context = MeshContext(strategy_config=ddp, moe_parallel_config=moe)
    setup = DistributedSetup(context, activation_checkpointing=True)
    assert setup.strategy_config is setup.mesh_context.strategy_config is ddp
    assert setup.moe_parallel_config is setup.mesh_context.moe_parallel_config is moe
    assert setup.mesh_context.activation_checkpointing == "full"
    with pytest.raises(ValueError, match="differs from that of mesh_context"):
        DistributedSetup(context, strategy_config=FSDP2Config())


def test_a_setup_leaves_the_context_that_it_was_given_alone() -> None:
    with fake_world(4):
        context = MeshContext.build(FSDP2Config(), ranks=[0, 1])
        plain = DistributedSetup(context)
        full = DistributedSetup(context, activation_checkpointing="full")
        moe = DistributedSetup(context, moe_parallel_config=MoEParallelizerConfig())
        assert plain.mesh_context is context
        assert context.activation_checkpointing is False
        assert context.moe_parallel_config is None
        assert full.mesh_context.activation_checkpointing == "full"
        assert full.mesh_context.moe_parallel_config is None
        assert moe.mesh_context.moe_parallel_config == MoEParallelizerConfig()
        assert full.mesh_context.device_mesh is context.device_mesh
        assert full.mesh_context.process_group is context.process_group is not None
        same = DistributedSetup(context, strategy_config=FSDP2Config())
        assert same.mesh_context is context
        assert same.strategy_config is context.strategy_config
    bare = MeshContext()
    assert DistributedSetup(bare, strategy_config=DDPConfig()).mesh_context is not bare
    assert bare.strategy_config is None


def test_a_pipeline_config_needs_pipeline_ranks() -> None:
    words = "pipeline_config=.* pp_size is 1: use pp_size > 1"
    with pytest.raises(ValueError, match=words):
        DistributedSetup(MeshContext(), pipeline_config=PipelineConfig())
    with pytest.raises(ValueError, match=words):
        DistributedSetup.build(pipeline_config=PipelineConfig())
    assert not dist.is_initialized()


REFUSED = [
    (DDPConfig(), {"tp_size": 2}, "FSDP2Config or MegatronFSDPConfig"),
    (DDPConfig(), {"cp_size": 2}, "FSDP2Config or MegatronFSDPConfig"),
    (DDPConfig(), {"pp_size": 2}, "use FSDP2Config,"),
    (DDPConfig(), {"ep_size": 2}, "use FSDP2Config,"),
    (DDPConfig(), {"dp_replicate_size": 2}, "use FSDP2Config,"),
    (MegatronFSDPConfig(), {"pp_size": 2}, "use FSDP2Config,"),
    (MegatronFSDPConfig(), {"ep_size": 2}, "use FSDP2Config,"),
    (MegatronFSDPConfig(), {"dp_replicate_size": 4}, "use FSDP2Config,"),
]


@pytest.mark.parametrize(("strategy", "sizes", "words"), REFUSED)
def test_sizes_that_a_strategy_cannot_do(strategy: Any, sizes: dict[str, int], words: str) -> None:
    ((name, size),) = sizes.items()
    with fake_world(4):
        with pytest.raises(ValueError, match=f"{name}={size} is not supported") as error:
            MeshContext.build(strategy, ParallelismSizes(**sizes))
        assert words in str(error.value)
        both = MeshContext.build(FSDP2Config(), ParallelismSizes(**sizes))
        with pytest.raises(ValueError, match=f"{name}={size} is not supported"):
            MeshContext.from_meshes(both.device_mesh, both.moe_mesh, strategy)


def test_the_ring_and_ulysses_degrees_must_make_cp() -> None:
    with fake_world(8):
        sizes = ParallelismSizes(cp_size=4)
        for ring, ulysses in [(3, None), (2, 4), (1, 2), (4, 0), (0, None), (-1, -4)]:
            with pytest.raises(ValueError, match="cp_"):
                MeshContext.build(
                    FSDP2Config(), sizes, cp_ring_degree=ring, cp_ulysses_degree=ulysses
                )
        context = MeshContext.build(FSDP2Config(), sizes, cp_ring_degree=2)
        assert (context.cp_ring_degree, context.cp_ulysses_degree) == (2, None)
    with pytest.raises(ValueError, match="cp_size 1 = cp_ring_degree 2"):
        MeshContext(cp_ring_degree=2)


def test_setup_takes_names_and_dicts() -> None:
    with fake_world(4):
        setup = DistributedSetup.build(
            "FSDP2",
            parallelism_sizes={"pp_size": 2},  # type: ignore[arg-type]
            pipeline_config={"pp_schedule": "gpipe"},
            moe_parallel_config={"wrap_outer_model": False},
            timeout_minutes=0.25,
        )
        assert isinstance(setup.strategy_config, FSDP2Config)
        assert setup.mesh_context.pp_size == 2
        assert setup.pipeline_config == PipelineConfig(pp_schedule="gpipe")
        assert setup.moe_parallel_config == MoEParallelizerConfig(wrap_outer_model=False)
        for name in ("mfsdp", "megatron_fsdp", "megatron-fsdp"):
            assert isinstance(DistributedSetup.build(name).strategy_config, MegatronFSDPConfig)
        for name in ("fsdp2", "ddp"):
            DistributedSetup.build(name)


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "fsdp3"}, "did you mean 'fsdp2'"),
    ({"strategy": None}, "must be a FSDP2Config"),
    ({"parallelism_sizes": {"tp": 2}}, "did you mean 'tp_size'"),
    ({"parallelism_sizes": 4}, "must be a ParallelismSizes"),
    ({"pipeline_config": {"schedule": "1f1b"}}, "did you mean 'pp_schedule'"),
    ({"moe_parallel_config": {"mp_polic": None}}, "did you mean 'mp_policy'"),
    ({"moe_parallel_config": True}, "must be a MoEParallelizerConfig"),
    ({"timeout_minutes": 0}, "timeout_minutes=0"),
    ({"timeout_minutes": "1"}, "timeout_minutes='1'"),
    ({"timeout_minutes": float("nan")}, "timeout_minutes=nan"),
    ({"timeout_minutes": 1e-6}, "timeout_minutes=1e-06 must be from 1/60000"),
    ({"timeout_minutes": 10_000_001}, "timeout_minutes=10000001 must be from 1/60000"),
    ({"timeout_minutes": 10**400}, "(one millisecond) to 10000000"),
    ({"world_size": 8}, "the job has 4 processes"),
    ({"world_size": 4.0}, "world_size=4.0"),
    ({"world_size": 3, "ranks": [0, 1]}, "neither"),
    ({"ranks": []}, "non-empty list"),
    ({"ranks": "01"}, "non-empty list"),
    ({"ranks": [0, 0]}, "twice"),
    ({"ranks": [0, 4]}, "from 0 to 3"),
    ({"ranks": [True]}, "True"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_ARGUMENTS)
def test_bad_arguments_of_build(arguments: dict[str, Any], words: str) -> None:
    with fake_world(4), pytest.raises((ValueError, TypeError)) as error:
        DistributedSetup.build(**arguments)
    assert words in str(error.value)


def test_a_job_without_process_groups_is_told_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="initialize_distributed first"):
        MeshContext.build(FSDP2Config(), world_size=4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="initialize_distributed first"):
        MeshContext.build(FSDP2Config())
    with pytest.raises(ValueError, match="world_size 2 = pp 1 x dp"):
        MeshContext.build(FSDP2Config(), ParallelismSizes(tp_size=3))
    assert not dist.is_initialized()


def test_an_expert_mesh_comes_with_a_moe_config() -> None:
    with fake_world(8, 5):
        moe = MoEParallelizerConfig()
        context = MeshContext.build(FSDP2Config(), ParallelismSizes(tp_size=2), moe)
        assert context.moe_mesh is not None
        assert tuple(context.moe_mesh.shape) == (8, 1)
        assert context.ep_size == 1
        assert context.parallelize_axis_kwargs()["ep_axis_name"] is None
        assert context.parallelize_axis_kwargs()["ep_shard_axis_names"] == ("ep_shard",)


def test_mesh_helpers_name_the_axes_that_are_there() -> None:
    with fake_world(8, 3):
        mesh = MeshContext.build(FSDP2Config(), ParallelismSizes(tp_size=2)).device_mesh
        assert mesh is not None
        for ask in (get_flat_mesh, get_submesh):
            with pytest.raises(ValueError, match="no axis 'ep': its axes are pp, dp_replicate"):
                ask(mesh, "ep")
        with pytest.raises(ValueError, match="make no mesh"):
            get_submesh(mesh, ("dp", "dp_shard"))
        assert get_submesh(mesh, ("dp_shard_cp", "tp")).shape == (4, 2)
        assert get_submesh(mesh, mesh.mesh_dim_names or ()) is mesh
        assert get_fsdp_dp_mesh(mesh["dp_shard", "tp"]).mesh_dim_names == ("dp_shard_cp",)


def test_offload_needs_a_backend_for_cpu_tensors() -> None:
    """B55: gradients of offloaded parameters are reduced on the CPU when they are clipped."""
    offload = FSDP2Config(offload_policy=CPUOffloadPolicy(pin_memory=False))
    check_offload(offload, "cuda", "cpu:gloo,cuda:nccl")
    check_offload(offload, "cpu", "cuda:nccl")
    check_offload(FSDP2Config(), "cuda", "cuda:nccl")
    with pytest.raises(ValueError, match="cpu:gloo,cuda:nccl"):
        check_offload(offload, "cuda", "cuda:nccl")


def test_every_coordinate_but_tp_has_its_own_seed() -> None:
    def draw(rank: int, seed: int) -> tuple[int, ...]:
        with fake_world(32, rank):
            sizes = ParallelismSizes(pp_size=2, dp_replicate_size=2, cp_size=2, tp_size=2)
            context = MeshContext.build(FSDP2Config(), sizes)
            seed_everything(context, seed)
            return tuple(torch.randint(1 << 40, (3,)).tolist())

    state = torch.get_rng_state()
    first, second = ([draw(rank, seed) for rank in range(32)] for seed in (0, 1))
    assert first == [draw(rank, 0) for rank in range(32)]
    torch.set_rng_state(state)
    assert first[0::2] == first[1::2]
    assert len({*first, *second}) == 32
    with pytest.raises(TypeError, match="seed='1'"):
        seed_everything(MeshContext(), "1")  # type: ignore[arg-type]


def test_trainability_callbacks_are_kept() -> None:
    def freeze(model: nn.Module) -> None:
        model.requires_grad_(False)

    with fake_world(2):
        context = MeshContext.build(FSDP2Config(), reapply_trainability=freeze)
        assert context.reapply_trainability is freeze
