"""The dense walk on GPUs: training has the numbers of one process, whatever the mesh and options.

Only torch, pytest and shardwalk are imported, so that these tests run on a bare GPU machine.
"""

from __future__ import annotations

from functools import partial

import pytest

from shardwalk.mesh import DDPConfig, FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core.testing import (
    Bf16,
    ParityCase,
    TinyDecoder,
    TokenBatches,
    assert_parity,
    tiny_decoder_case,
)
from tests.gpu.worlds import BACKEND, gpu_pool, meshes, worlds

# Ranks and replicas; one replica is plain FSDP, as many as ranks is replication alone.
MESHES = meshes((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4))
WIDE = meshes((1, 1), (2, 1), (4, 2), (8, 4))

mesh = pytest.mark.parametrize(("world", "replicas"), WIDE)
ties = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def run(case: ParityCase, world: int, replicas: int = 1, **options: object) -> None:
    sizes = ParallelismSizes(dp_replicate_size=replicas)
    pool = gpu_pool(world)
    assert_parity(case, world_size=world, parallelism_sizes=sizes, pool=pool, **options)


@ties
@pytest.mark.parametrize(("world", "replicas"), MESHES)
def test_fsdp_has_the_numbers_of_one_process(world: int, replicas: int, tied: bool) -> None:
    run(tiny_decoder_case(tied=tied), world, replicas)


@ties
@pytest.mark.parametrize("world", worlds(1, 2, 4, 8))
def test_ddp_has_the_numbers_of_one_process(world: int, tied: bool) -> None:
    run(tiny_decoder_case(tied=tied), world, strategy=DDPConfig())


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
@pytest.mark.parametrize("world", worlds(1, 2, 4, 8))
def test_accumulation_over_unequal_micro_batches(world: int, strategy: str) -> None:
    run(tiny_decoder_case(micro_batches=3), world, strategy=strategy, clip=0.5)


@mesh
def test_accumulation_with_replicas(world: int, replicas: int) -> None:
    run(tiny_decoder_case(micro_batches=3), world, replicas, clip=0.5)


@ties
@mesh
def test_a_meta_start_from_an_init_function(world: int, replicas: int, tied: bool) -> None:
    run(tiny_decoder_case(tied=tied), world, replicas, meta_start="init", optimizers=("adamw",))


@ties
@mesh
def test_a_meta_start_from_a_checkpoint(world: int, replicas: int, tied: bool) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed here")
    case = tiny_decoder_case(tied=tied)
    run(case, world, replicas, meta_start="checkpoint", optimizers=("adamw",))


@ties
@mesh
def test_bf16_compute_with_fp32_reduction(world: int, replicas: int, tied: bool) -> None:
    run(tiny_decoder_case(tied=tied), world, replicas, bf16=Bf16())


OPTIONS = {
    "resharded everywhere": {"reshard_after_forward": True},
    "kept gathered": {"reshard_after_forward": False},
    "prefetch": {"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": 2},
    "offload": {"offload_policy": {"pin_memory": BACKEND == "nccl"}},
    "offload unpinned": {"offload_policy": {"pin_memory": False}},
    "sync every micro-batch": {"defer_fsdp_grad_sync": False},
}


@pytest.mark.parametrize("option", OPTIONS)
@mesh
def test_no_option_changes_the_numbers(world: int, replicas: int, option: str) -> None:
    config = FSDP2Config(mp_policy={"param_dtype": None}, **OPTIONS[option])
    run(tiny_decoder_case(micro_batches=2), world, replicas, strategy=config, clip=0.5)


@pytest.mark.parametrize("start", [None, "init"])
@mesh
def test_offload_from_either_start(world: int, replicas: int, start: str | None) -> None:
    config = FSDP2Config(
        mp_policy={"param_dtype": None}, offload_policy={"pin_memory": BACKEND == "nccl"}
    )
    run(tiny_decoder_case(), world, replicas, strategy=config, meta_start=start)


def wide_decoder() -> TinyDecoder:
    return TinyDecoder(vocabulary=1024, dim=512, heads=8, ffn=1376, layers=4)


@mesh
def test_a_model_large_enough_for_the_kernels_of_gpus(world: int, replicas: int) -> None:
    case = ParityCase(
        model=partial(wide_decoder), batches=TokenBatches(vocabulary=1024, length=128)
    )
    run(case, world, replicas, optimizers=("sgd",))
