"""Which hook of a sidecar each context leads to, and with what."""

import pytest
import torch
from torch import nn
from walk_toys import Decoder, context

from shardwalk.mesh import DDPConfig, FSDP2Config, MeshContext, MoEParallelizerConfig
from shardwalk.parallelizer_core import ModelParallelizer, parallelize_model
from shardwalk.parallelizer_core.testing import run_on_ranks


class Hooks(ModelParallelizer):
    """Records the hooks that are called, and changes nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def _apply(self, model, device_mesh, *args, **kwargs):
        self.calls.append(("_apply", kwargs))
        return model

    def _apply_moe(self, model, mesh_context):
        self.calls.append(("_apply_moe", mesh_context))
        return model

    def _apply_unsharded(self, model, mesh_context):
        self.calls.append(("_apply_unsharded", mesh_context))
        return super()._apply_unsharded(model, mesh_context)


class Owning(Decoder):
    parallelizer = Hooks()


def hooks_of(strategy, moe=None):
    hooks = Owning.parallelizer = Hooks()
    mesh_context = MeshContext.from_meshes(
        context().device_mesh, strategy_config=strategy, moe_parallel_config=moe
    )
    parallelize_model(Owning(), mesh_context)
    assert all(given is mesh_context for _, given in hooks.calls if isinstance(given, MeshContext))
    return [name for name, _ in hooks.calls]


@pytest.mark.parametrize(
    ("world", "strategy", "moe", "expected"),
    [
        (2, FSDP2Config(), None, ["_apply"]),
        (2, None, None, ["_apply"]),
        (2, FSDP2Config(), MoEParallelizerConfig(), ["_apply_moe"]),
        (1, FSDP2Config(), MoEParallelizerConfig(), ["_apply_moe"]),
        (1, FSDP2Config(), None, ["_apply_unsharded", "_apply"]),
        (2, DDPConfig(), None, []),
    ],
)
def test_each_context_leads_to_its_hook(world, strategy, moe, expected):
    assert run_on_ranks(world, hooks_of, strategy, moe) == [expected] * world


def options_reach_the_dense_path(config):
    hooks = Owning.parallelizer = Hooks()
    trainability = nn.Identity()
    mesh_context = MeshContext.from_meshes(
        context().device_mesh, strategy_config=config, reapply_trainability=trainability
    )
    parallelize_model(Owning(), mesh_context)
    ((_, given),) = hooks.calls
    assert given.pop("reapply_trainability") is trainability
    return given


def test_every_option_of_the_strategy_reaches_the_dense_path():
    config = FSDP2Config(
        mp_policy={"param_dtype": "float16"},
        offload_policy={"pin_memory": False},
        enable_fsdp2_prefetch=True,
        fsdp2_backward_prefetch_depth=3,
        fsdp2_forward_prefetch_depth=4,
        reshard_after_forward=False,
    )
    (given, _) = run_on_ranks(2, options_reach_the_dense_path, config)
    assert given.pop("mp_policy").param_dtype == torch.float16
    assert given.pop("offload_policy").pin_memory is False
    assert given == {
        "sequence_parallel": False,
        "activation_checkpointing": False,
        "tp_shard_plan": None,
        "enable_async_tensor_parallel": False,
        "enable_compile": False,
        "enable_fsdp2_prefetch": True,
        "fsdp2_backward_prefetch_depth": 3,
        "fsdp2_forward_prefetch_depth": 4,
        "reshard_after_forward": False,
        "activation_checkpointing_scope": "all",
        "frozen_multimodal_sharding": "root",
    }
