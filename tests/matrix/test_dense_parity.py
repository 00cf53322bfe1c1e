"""The dense walk on models of transformers and a plain stack: the numbers of one process."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from shardwalk.mesh import DDPConfig, FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core.testing import (
    Bf16,
    ParityCase,
    TokenBatches,
    assert_parity,
    tiny_decoder_case,
)
from tests.matrix.tiny_transformers import MODELS, normal_weights

MESHES = {
    "one rank": (1, "fsdp2", ParallelismSizes()),
    "fsdp 2": (2, "fsdp2", ParallelismSizes()),
    "fsdp 4": (4, "fsdp2", ParallelismSizes()),
    "hsdp 2x2": (4, "fsdp2", ParallelismSizes(dp_replicate_size=2)),
    "hsdp 2x1": (2, "fsdp2", ParallelismSizes(dp_replicate_size=2)),
    "ddp 2": (2, "ddp", ParallelismSizes()),
}


def build(name: str, tied: bool) -> nn.Module:
    return MODELS[name](tied)


def case(name: str, tied: bool, micro_batches: int = 1) -> ParityCase:
    if name == "plain":
        return tiny_decoder_case(tied=tied, micro_batches=micro_batches)
    return ParityCase(
        model=partial(build, name, tied),
        batches=TokenBatches(vocabulary=61, micro_batches=micro_batches),
        init=normal_weights,
    )


ties = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
models = pytest.mark.parametrize("name", ["plain", *MODELS])


def meshes(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mesh", names or tuple(MESHES))


def run(parity_case: ParityCase, mesh: str, **options: object) -> None:
    world_size, strategy, sizes = MESHES[mesh]
    options = {"strategy": strategy, **options}
    assert_parity(parity_case, world_size=world_size, parallelism_sizes=sizes, **options)


@pytest.mark.pairwise
@meshes()
@ties
@models
def test_training_has_the_numbers_of_one_process(name: str, tied: bool, mesh: str) -> None:
    run(case(name, tied), mesh)


@meshes("fsdp 4", "hsdp 2x2", "ddp 2")
@models
def test_three_micro_batches_with_unequal_token_counts(name: str, mesh: str) -> None:
    run(case(name, tied=True, micro_batches=3), mesh, clip=0.5)


@pytest.mark.pairwise
@meshes("fsdp 4", "hsdp 2x2", "one rank")
@ties
@pytest.mark.parametrize("start", ["checkpoint", "init"])
@models
def test_a_start_on_the_meta_device(name: str, start: str, tied: bool, mesh: str) -> None:
    run(case(name, tied), mesh, meta_start=start, optimizers=("adamw",))


@pytest.mark.pairwise
@meshes("fsdp 4", "hsdp 2x2", "one rank")
@ties
@models
def test_bf16_compute_with_fp32_reduction(name: str, tied: bool, mesh: str) -> None:
    run(case(name, tied), mesh, bf16=Bf16())


OPTIONS = {
    "resharded everywhere": {"reshard_after_forward": True},
    "kept gathered": {"reshard_after_forward": False},
    "prefetch": {"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": 2},
    "no depth": {"enable_fsdp2_prefetch": True, "fsdp2_backward_prefetch_depth": 0},
    "offload": {"offload_policy": {"pin_memory": False}},
    "sync every micro-batch": {"defer_fsdp_grad_sync": False},
}


@meshes("one rank", "hsdp 2x2")
@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_changes_the_numbers(option: str, mesh: str) -> None:
    config = FSDP2Config(mp_policy={"param_dtype": None}, **OPTIONS[option])
    run(case("plain", tied=False, micro_batches=2), mesh, strategy=config, clip=0.5)


DDP_OPTIONS = {
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    "unused parameters": {"find_unused_parameters": True},
    "buffers": {"broadcast_buffers": True},
}


@pytest.mark.parametrize("option", DDP_OPTIONS)
def test_no_ddp_option_changes_the_numbers(option: str) -> None:
    config = DDPConfig(**DDP_OPTIONS[option])
    run(case("plain", tied=True, micro_batches=2), "ddp 2", strategy=config, optimizers=("sgd",))
