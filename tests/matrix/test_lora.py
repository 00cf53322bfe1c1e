"""Adapters by peft on a frozen base: the numbers of one process on every mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from shardwalk.mesh import FSDP2Config
from shardwalk.parallelizer_core.testing import (
    Bf16,
    ParityCase,
    TokenBatches,
    assert_parity,
)
from tests.matrix.lora_models import lora
from tests.matrix.test_dense_parity import MESHES, meshes
from tests.matrix.tiny_transformers import normal_weights


def case(name: str = "llama", micro_batches: int = 1, **options: Any) -> ParityCase:
    return ParityCase(
        model=partial(lora, name, **options),
        batches=TokenBatches(vocabulary=61, micro_batches=micro_batches),
        init=normal_weights,
    )


def run(parity_case: ParityCase, mesh: str, **options: Any) -> None:
    world_size, strategy, sizes = MESHES[mesh]
    options = {"strategy": strategy, **options}
    assert_parity(parity_case, world_size=world_size, parallelism_sizes=sizes, **options)


CHECKPOINTING = pytest.mark.parametrize("mode", [False, "full", "selective"])


@meshes("one rank", "fsdp 2", "fsdp 4", "hsdp 2x2", "ddp 2")
@CHECKPOINTING
def test_adapters_train_to_the_numbers_of_one_process(mode: Any, mesh: str) -> None:
    """B12 and B02: with blocks that are recomputed above a frozen embedding too."""
    run(case(), mesh, setup={"activation_checkpointing": mode})


@meshes("fsdp 4", "hsdp 2x2")
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_models_with_tied_tables(name: str, mesh: str) -> None:
    run(case(name, tied=True, layers=3), mesh, optimizers=("adamw",))


@meshes("fsdp 4", "hsdp 2x2", "ddp 2")
def test_micro_batches_and_clipping(mesh: str) -> None:
    run(case(micro_batches=3), mesh, clip=0.05, optimizers=("sgd",))


@meshes("fsdp 2", "hsdp 2x2")
@pytest.mark.parametrize("start", ["checkpoint", "init"])
def test_a_start_on_the_meta_device(start: str, mesh: str) -> None:
    """Adapters on meta get their values along with the base."""
    run(case(), mesh, meta_start=start, optimizers=("adamw",))


@meshes("fsdp 2", "hsdp 2x2")
def test_bf16_compute_with_fp32_reduction(mesh: str) -> None:
    run(case(), mesh, bf16=Bf16())


OPTIONS = {
    "resharded everywhere": {"reshard_after_forward": True},
    "kept gathered": {"reshard_after_forward": False},
    "prefetch": {"enable_fsdp2_prefetch": True},
    "offload": {"offload_policy": {"pin_memory": False}},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_changes_the_numbers(option: str) -> None:
    config = FSDP2Config(mp_policy={"param_dtype": None}, **OPTIONS[option])
    run(case(micro_batches=2), "fsdp 2", strategy=config, optimizers=("sgd",))
