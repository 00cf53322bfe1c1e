"""What a context may hold: the axes of its meshes, and values assigned after it was made."""

import pytest
from mesh_ranks import fake_world
from torch.distributed.device_mesh import init_device_mesh

from shardwalk.mesh import DDPConfig, FSDP2Config, MeshContext, ParallelismSizes


def test_axis_names_are_checked_on_construction_and_assignment() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shrd", "tp"))
        with pytest.raises(ValueError, match="did you mean 'dp_shard'"):
            MeshContext.from_meshes(mesh)
        context = MeshContext()
        with pytest.raises(ValueError, match="did you mean 'dp_shard'"):
            context.device_mesh = mesh
        with pytest.raises(ValueError, match="without a name"):
            context.moe_mesh = init_device_mesh("cpu", (4,))
        with pytest.raises(TypeError, match="must be a DeviceMesh"):
            context.device_mesh = "mesh"  # type: ignore[assignment]
        with pytest.raises(TypeError, match="takes names too"):
            context.strategy_config = "fsdp2"  # type: ignore[assignment]
        with pytest.raises(TypeError, match="callable"):
            context.reapply_trainability = 1  # type: ignore[assignment]
        with pytest.raises(TypeError, match="MoEParallelizerConfig"):
            context.moe_parallel_config = {}  # type: ignore[assignment]


USELESS_AXES = [
    ("device_mesh", ("ep", "tp"), "'ep', which belongs to moe_mesh"),
    ("device_mesh", ("dp_shard", "ep_shard"), "'ep_shard', which belongs to moe_mesh"),
    ("device_mesh", ("dp_cp", "tp"), "'dp_cp', which is a flattened view"),
    ("device_mesh", ("data", "tp"), "'data', which nothing reads in a device_mesh"),
    ("device_mesh", ("dp", "dp_shard"), "'dp' and 'dp_shard', which overlap"),
    ("device_mesh", ("dp", "dp_shard_cp"), "'dp' and 'dp_shard_cp', which overlap"),
    ("device_mesh", ("dp_shard_cp", "dp_shard"), "'dp_shard' and 'dp_shard_cp', which overlap"),
    ("device_mesh", ("dp_replicate", "dp"), "'dp' and 'dp_replicate', which overlap"),
    ("device_mesh", ("dp_shard_cp", "cp"), "'dp_shard_cp' and 'cp', which overlap"),
    ("moe_mesh", ("dp_shard", "ep"), "'dp_shard', which belongs to device_mesh"),
    ("moe_mesh", ("ep_replicate", "experts"), "'experts', which nothing reads in a moe_mesh"),
]


@pytest.mark.parametrize(("option", "names", "words"), USELESS_AXES)
def test_axes_that_nothing_reads_are_refused(
    option: str, names: tuple[str, ...], words: str
) -> None:
    """Ranks along such an axis would train apart from each other, unnoticed."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(ValueError, match=words):
            MeshContext(**{option: mesh})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=words):
            setattr(MeshContext(), option, mesh)


def test_an_assigned_strategy_is_checked_like_a_given_one() -> None:
    with fake_world(4):
        context = MeshContext.build(FSDP2Config(), ParallelismSizes(dp_replicate_size=2))
        kept = context.strategy_config
        with pytest.raises(ValueError, match="dp_replicate_size=2 is not supported by DDPConfig"):
            context.strategy_config = DDPConfig()
        assert context.strategy_config is kept
        context.strategy_config = FSDP2Config(activation_checkpointing="full")
        assert context.activation_checkpointing == "full"
        kept = context.strategy_config
        with pytest.raises(ValueError, match="mesh_context: 'full', strategy_config: 'selective'"):
            context.strategy_config = FSDP2Config(activation_checkpointing="selective")
        assert context.strategy_config is kept
        assert context.activation_checkpointing == "full"


def test_names_that_a_context_has_not_cannot_be_assigned() -> None:
    context = MeshContext()
    with pytest.raises(AttributeError, match="did you mean 'activation_checkpointing'"):
        context.activation_checkpoint = "full"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="tp_size cannot be assigned"):
        context.tp_size = 2  # type: ignore[misc]
