"""What is not in this version, or asked for wrongly: refused before anything happens."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from walk_toys import Decoder, context

from shardwalk.mesh import (
    DDPConfig,
    DistributedSetup,
    FSDP2Config,
    MegatronFSDPConfig,
    MeshContext,
    MoEParallelizerConfig,
    ParallelismSizes,
)
from shardwalk.parallelizer_core import ModelParallelizer, parallelize_model
from shardwalk.parallelizer_core.refusals import refuse_async_tensor_parallel
from shardwalk.parallelizer_core.tensor_parallel import ColumnParallel
from shardwalk.parallelizer_core.testing import cached, run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives


def refuses(match, mesh_context):
    model = Decoder()
    before = dict(model.named_parameters())
    with CountCollectives() as counted, pytest.raises((ValueError, ImportError), match=match):
        parallelize_model(model, mesh_context)
    assert not counted.calls
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def refused_options():
    for option, value, named in [
        ("tp_plan", "some_plan", "tp_plan='some_plan'"),
        ("tp_plan", {"layers.7.up": ColumnParallel()}, "layers.7.up"),
        ("autocast_dtype", torch.float64, "autocast_dtype=torch.float64"),
        ("multimodal", {"frozen_sharding": "per_layer"}, "frozen_sharding='per_layer'"),
        ("multimodal", {"frozen_sharding": "replicate"}, "frozen_sharding='replicate'"),
        ("offload_policy", CPUOffloadPolicy(), "pin_memory=True.*accelerator"),
    ]:
        refuses(named, context(**{option: value}))
    refuses(
        "autocast_dtype=torch.float32",
        MeshContext.from_meshes(
            context().device_mesh, strategy_config=DDPConfig(autocast_dtype=torch.float32)
        ),
    )
    refuses(
        "'selective' under Megatron-FSDP",
        MeshContext.from_meshes(
            context().device_mesh,
            strategy_config=MegatronFSDPConfig(),
            activation_checkpointing="selective",
        ),
    )
    refuses(
        "strategy='megatron_fsdp' (needs the package|runs on CUDA only)",
        MeshContext.from_meshes(context().device_mesh, strategy_config=MegatronFSDPConfig()),
    )
    refuses(
        "install shardwalk-moe-ep",
        MeshContext.from_meshes(
            context().device_mesh,
            strategy_config=FSDP2Config(),
            moe_parallel_config=MoEParallelizerConfig(),
        ),
    )


def test_options_of_later_versions_are_refused_and_nothing_is_touched():
    run_on_ranks(2, refused_options)


def refused_sizes(axis):
    sizes = ParallelismSizes(**{f"{axis}_size": 2})
    refuses(
        "install shardwalk-moe-ep" if axis == "ep" else f"{axis}_size=2",
        DistributedSetup.build("fsdp2", sizes).mesh_context,
    )


@pytest.mark.parametrize("axis", ["pp", "cp", "ep"])
def test_axes_of_later_versions_are_refused(axis):
    run_on_ranks(2, refused_sizes, axis)


def outsider():
    setup = DistributedSetup.build("fsdp2", ranks=[0])
    if setup.mesh_context.is_member:
        return parallelize_model(Decoder(), setup.mesh_context) is not None
    refuses("rank 1 is not one of the ranks of this mesh", setup.mesh_context)
    return None


def test_a_rank_outside_the_mesh_is_refused():
    assert run_on_ranks(2, outsider) == [True, None]


def unshardable():
    def hooked(model):
        model.norm.weight.register_hook(lambda gradient: gradient)

    def hooked_after(model):
        model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: None)

    def renormalized(model):
        model.embed.max_norm = 1.0

    def sparse(model):
        model.embed.sparse = True

    def aliased(model):
        model.head.weight.data = model.embed.weight.data

    for change, named in [
        (hooked, "norm.weight has a hook"),
        (hooked_after, "norm.weight has a hook"),
        (renormalized, "embed has max_norm=1.0"),
        (sparse, "embed has sparse=True"),
        (aliased, "head.weight and embed.weight are two parameters over one storage"),
    ]:
        model = Decoder()
        change(model)
        with CountCollectives() as counted, pytest.raises(ValueError, match=named):
            parallelize_model(model, context())
        assert not counted.calls
    model = Decoder()
    model.head.weight.no_decay = True
    assert parallelize_model(model, context()).head.weight.no_decay is True


def test_what_shards_would_change_is_refused_by_name_and_marks_on_parameters_stay():
    run_on_ranks(2, unshardable)


def set_and_parallelize(config):
    mesh_context = context()
    if isinstance(config, DDPConfig):
        mesh_context.moe_parallel_config = MoEParallelizerConfig()
    mesh_context.strategy_config = config
    parallelize_model(Decoder(), mesh_context)


def set_later():
    for config in (FSDP2Config(autocast_dtype="float64"), DDPConfig()):
        with pytest.raises(ValueError, match="autocast_dtype|moe_parallel_config"):
            set_and_parallelize(config)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in torch.compile
def test_what_is_set_on_a_context_later_is_read_too():
    run_on_ranks(2, set_later)
    with pytest.raises(ValueError, match="moe_parallel_config means nothing"):
        parallelize_model(Decoder(), MeshContext(moe_parallel_config=MoEParallelizerConfig()))
    compiled = torch.compile(Decoder())
    with pytest.raises(ValueError, match="compiled already"):
        parallelize_model(compiled, MeshContext())
    with pytest.raises(ValueError, match="DataParallel"):
        parallelize_model(nn.DataParallel(Decoder()), MeshContext())


def twice():
    model = parallelize_model(Decoder(), context())
    with pytest.raises(ValueError, match="the model is parallelized already"):
        parallelize_model(model, context())


def test_a_parallelized_model_is_refused():
    run_on_ranks(2, twice)


def split_by_hand(strategy):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = cached("tp by hand", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    model = Decoder()
    parallelize_module(model.layers[1], mesh, {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"layers\.1\.up\.weight is a DTensor over tp already"):
        parallelize_model(
            model, MeshContext.from_meshes(context().device_mesh, strategy_config=strategy)
        )


@pytest.mark.parametrize("strategy", [FSDP2Config(), DDPConfig()])
def test_a_model_split_by_hand_is_refused(strategy):
    run_on_ranks(2, split_by_hand, strategy)


def test_arguments_of_the_wrong_kind_name_what_was_given():
    setup = object.__new__(DistributedSetup)
    object.__setattr__(setup, "mesh_context", MeshContext())
    with pytest.raises(TypeError, match=r"not DistributedSetup; pass its \.mesh_context"):
        parallelize_model(Decoder(), setup)
    with pytest.raises(TypeError, match="not dict"):
        parallelize_model({}, MeshContext())


@pytest.mark.parametrize("model", [nn.ModuleList([Decoder()]), nn.ModuleDict({"a": Decoder()})])
def test_a_container_that_nobody_calls_is_refused(model):
    with pytest.raises(ValueError, match=r"Module(List|Dict) has no forward"):
        parallelize_model(model, MeshContext())


def test_a_strategy_without_a_mesh_is_refused_and_a_bare_context_shards_nothing():
    with pytest.raises(ValueError, match="strategy_config=FSDP2Config needs a mesh"):
        parallelize_model(Decoder(), MeshContext(strategy_config=FSDP2Config()))
    model, seen = Decoder(), []
    assert parallelize_model(model, MeshContext(reapply_trainability=seen.append)) is model
    assert seen == [model]


def refused_beside_tensor_parallelism():
    sizes = ParallelismSizes(tp_size=2)
    refuses(
        "enable_compile=True beside tp_size=2",
        DistributedSetup.build(FSDP2Config(enable_compile=True), sizes).mesh_context,
    )
    asynchronous = {"sequence_parallel": True, "enable_async_tensor_parallel": True}
    refuses(
        "enable_async_tensor_parallel=True exchanges through symmetric memory.* on cpu",
        DistributedSetup.build(FSDP2Config(**asynchronous), sizes).mesh_context,
    )
    refuses("needs a tensor-parallel mesh, and tp_size=1", context(**asynchronous))
    with pytest.raises(ValueError, match="sequence_parallel=False; set sequence_parallel=True"):
        refuse_async_tensor_parallel(True, sequence_parallel=False, tp_size=2, device_type="cuda")
    with pytest.raises(
        ValueError, match="needs compiled tensor-parallel blocks, and that is not in"
    ):
        refuse_async_tensor_parallel(True, sequence_parallel=True, tp_size=2, device_type="cuda")


def test_compile_and_asynchronous_tensor_parallelism_say_what_they_lack():
    run_on_ranks(2, refused_beside_tensor_parallelism)


def hooks_refuse():
    sidecar, mesh = ModelParallelizer(), context().device_mesh
    with pytest.raises(ValueError, match="did you mean 'full'"):
        sidecar._apply(Decoder(), mesh, activation_checkpointing="ful")
    with pytest.raises(ValueError, match="enable_async_tensor_parallel=True"):
        sidecar._apply(Decoder(), mesh, enable_async_tensor_parallel=True)
    with pytest.raises(ValueError, match="frozen_multimodal_sharding='replicate'"):
        sidecar._apply(Decoder(), mesh, frozen_multimodal_sharding="replicate")


def test_the_hooks_refuse_as_well_when_a_sidecar_calls_them():
    run_on_ranks(2, hooks_refuse)


def trainability():
    frozen = lambda model: model.embed.requires_grad_(False)  # noqa: E731
    mesh_context = context()
    mesh_context.reapply_trainability = frozen
    model = parallelize_model(Decoder(), mesh_context)
    return [name for name, p in model.named_parameters() if not p.requires_grad]


def test_trainability_is_reapplied_before_units_are_made():
    assert run_on_ranks(2, trainability) == [["embed.weight"]] * 2


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.scale


def scalar_only():
    rank = torch.distributed.get_rank()
    model = parallelize_model(Scalar(), context())
    model(torch.tensor(float(rank + 1))).backward()
    return model.scale.grad.to_local().item()


def test_a_model_of_one_scalar_trains_with_the_mean_gradient():
    assert run_on_ranks(2, scalar_only) == [1.5, 1.5]
