"""Megatron-FSDP by the signatures of the real package, as far as a CPU goes."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwalk.mesh import (
    DistributedSetup,
    MegatronFSDPConfig,
    MeshContext,
    ParallelismSizes,
)
from shardwalk.parallelizer_core import parallelize_model, shard_optimizer
from shardwalk.parallelizer_core.megatron_fsdp import (
    megatron_fsdp,
    megatron_mesh,
    sharding_arguments,
    unit_classes,
)
from shardwalk.parallelizer_core.testing import TinyDecoder, cached, run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives
from shardwalk.parallelizer_core.testing.models import Block
from tests.matrix.tiny_transformers import MODELS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of optional packages that it looks for
    pytest.importorskip("megatron_fsdp")

FP32 = torch.float32
# What a field, set to a value, changes in the call of the package.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "zero_dp_strategy": (1, {"zero_dp_strategy": 1}),
    "init_fsdp_with_meta_device": (True, {"init_model_with_meta_device": True}),
    "grad_reduce_in_fp32": (True, {"main_grads_dtype": FP32, "grad_comm_dtype": FP32}),
    "preserve_fp32_weights": (True, {"main_params_dtype": FP32}),
    "overlap_grad_reduce": (False, {"overlap_grad_reduce": False}),
    "overlap_param_gather": (False, {"overlap_param_gather": False}),
    "report_nan_in_param_grad": (True, {"report_nan_in_param_grad": True}),
    "disable_bucketing": (True, {"disable_bucketing": True}),
    "calculate_per_token_loss": (True, {"calculate_per_token_loss": True}),
    "keep_fp8_transpose_cache": (True, {"keep_fp8_transpose_cache": True}),
    "nccl_ub": (True, {"nccl_ub": True}),
    "fsdp_double_buffer": (True, {"fsdp_double_buffer": True}),
}
ELSEWHERE = {
    "megatron_fsdp_unit_modules",  # test_units_*
    "activation_checkpointing",  # before the wrapper, as for every strategy
    "check_for_nan_in_grad",  # no argument of this release
    "average_in_collective",  # refused: needs an expert mesh
}


def flat(config: MegatronFSDPConfig, package: Any = None) -> dict[str, Any]:
    """The arguments, with those of the precision policy among them."""
    arguments = sharding_arguments(config, package or megatron_fsdp())
    policy = arguments.pop("mixed_precision_policy")
    return {**arguments, **dataclasses.asdict(policy)}


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(MegatronFSDPConfig)])
def test_every_field_changes_what_the_package_is_called_with(field: str) -> None:
    if field in ELSEWHERE:
        return
    value, expected = CHANGES[field]
    level = {"zero_dp_strategy": 0} if field.startswith("overlap") else {}
    before = flat(MegatronFSDPConfig(**level))
    after = flat(MegatronFSDPConfig(**{**level, field: value}))
    assert {n: v for n, v in after.items() if before[n] != v} == expected


def test_the_arguments_are_those_of_the_installed_signature() -> None:
    arguments = sharding_arguments(MegatronFSDPConfig(), megatron_fsdp())
    inspect.signature(megatron_fsdp().fully_shard_model).bind(nn.Linear(1, 1), **arguments)
    assert "check_for_nan_in_grad" not in arguments


def without(package: Any, *names: str) -> Any:
    """The package as if its release did not have those options: its functions, less of them."""

    def fully_shard_model(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("only its signature is read")

    signature = inspect.signature(package.fully_shard_model)
    kept = [p for name, p in signature.parameters.items() if name not in names]
    fully_shard_model.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return SimpleNamespace(
        fully_shard_model=fully_shard_model,
        MixedPrecisionPolicy=package.MixedPrecisionPolicy,
        __version__="0.0.1",
    )


def test_an_option_that_a_release_lacks_is_refused_where_it_is_set() -> None:
    """P28: the installed version decides, whatever it is."""
    package = without(megatron_fsdp(), "nccl_ub", "report_nan_in_param_grad")
    assert "nccl_ub" not in sharding_arguments(MegatronFSDPConfig(), package)
    for field in ("nccl_ub", "report_nan_in_param_grad"):
        with pytest.raises(ValueError, match=f"{field}=True is no option of .* 0.0.1; use .*False"):
            sharding_arguments(MegatronFSDPConfig(**{field: True}), package)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_in_collective": True}, "average_in_collective=True needs an expert mesh"),
        ({"overlap_param_gather": False}, "overlap_param_gather=False does nothing with zero_dp"),
        ({"overlap_grad_reduce": False, "zero_dp_strategy": 2}, "use overlap_grad_reduce=True, or"),
    ],
)
def test_what_the_package_would_not_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sharding_arguments(MegatronFSDPConfig(**options), megatron_fsdp())


def test_units_are_the_classes_that_the_model_names_or_its_blocks() -> None:
    model = MODELS["llama"](False)
    assert [cls.__name__ for cls in unit_classes(model, None)] == ["LlamaDecoderLayer"]
    assert unit_classes(TinyDecoder(), None) == [Block]
    with pytest.raises(ValueError, match="megatron_fsdp_unit_modules=None takes .* neither"):
        unit_classes(nn.Linear(2, 2), None)


def test_units_by_import_path() -> None:
    path = "shardwalk.parallelizer_core.testing.models.Block"
    assert unit_classes(TinyDecoder(), [path]) == [Block]
    for wrong, message in {
        "shardwalk.parallelizer_core.testing.models.Blok": "cannot be imported",
        "torch.nn.functional.relu": "no class of modules",
        "torch.nn.Conv2d": "TinyDecoder has no module of torch.nn.Conv2d",
    }.items():
        with pytest.raises(ValueError, match=message):
            unit_classes(TinyDecoder(), [wrong])


def setup() -> MeshContext:
    return cached("megatron", lambda: DistributedSetup.build("megatron_fsdp").mesh_context)


def index_of_the_package() -> tuple[Any, ...]:
    from megatron_fsdp import FSDPDistributedIndex

    mesh = setup().device_mesh
    assert mesh is not None
    index = FSDPDistributedIndex(
        device_mesh=megatron_mesh(mesh), dp_shard_dim="dp_shard_cp", tp_dim="tp"
    )
    both = index.get_submesh(["dp_shard_cp", "tp"])
    assert index.fsdp_group is mesh["dp_shard"].get_group()
    return both.mesh_dim_names, tuple(both.shape), index.get_submesh("tp").size()


def test_the_mesh_has_the_axis_of_one_that_the_package_asks_for() -> None:
    assert run_on_ranks(2, index_of_the_package) == [(("dp_shard_cp", "tp"), (2, 1), 1)] * 2


def refused_without_cuda() -> None:
    model = TinyDecoder()
    before = list(model.parameters())
    tensor_parallel = DistributedSetup.build("megatron_fsdp", ParallelismSizes(tp_size=2))
    for context, message in (
        (setup(), "strategy='megatron_fsdp' runs on CUDA only, and this mesh is on cpu"),
        (tensor_parallel.mesh_context, "tp_size=2 under strategy='megatron_fsdp'"),
    ):
        with CountCollectives() as counted, pytest.raises(ValueError, match=message):
            parallelize_model(model, context)
        assert not counted.calls
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("world", [1, 2])
def test_without_cuda_nothing_happens(world: int) -> None:
    """P28: one rank asks for no CUDA either."""
    if world == 1:
        run_on_ranks(1, refused_on_one_rank)
    else:
        run_on_ranks(2, refused_without_cuda)


def refused_on_one_rank() -> None:
    with pytest.raises(ValueError, match="runs on CUDA only"):
        parallelize_model(TinyDecoder(), setup())


def test_other_optimizers_are_left_alone() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    assert shard_optimizer(optimizer) is optimizer
    assert not optimizer.state
