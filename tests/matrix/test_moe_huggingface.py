"""Expert parallelism on models of transformers, unprepared: the numbers of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardwalk.mesh import FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core.testing import (
    Bf16,
    ParityCase,
    TokenBatches,
    Tolerance,
    assert_parity,
)
from tests.matrix.lora_models import with_adapters
from tests.matrix.tiny_moe_transformers import MODELS, build, fill

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "ep 2": (2, {"ep_size": 2}),
    "ep 4": (4, {"ep_size": 4}),
    "ep 2 x shard 2": (4, {"ep_size": 2}),
    "hsdp 2x2, ep 2": (4, {"ep_size": 2, "dp_replicate_size": 2}),
    "hsdp 2x2, ep 4": (4, {"ep_size": 4, "dp_replicate_size": 2}),
    "tp 2, ep 2": (4, {"tp_size": 2, "ep_size": 2}),
    "tp 2, ep 4": (4, {"tp_size": 2, "ep_size": 4}),
}
FULL = {"param_dtype": None, "reduce_dtype": None}


def case(name: str, micro_batches: int = 2, length: int = 11, **sizes: Any) -> ParityCase:
    return ParityCase(
        model=partial(build, name, **sizes),
        batches=TokenBatches(vocabulary=61, micro_batches=micro_batches, length=length),
        init=fill,
    )


def run(parity_case: ParityCase, mesh: str, **options: Any) -> None:
    world_size, sizes = MESHES[mesh]
    options = {"strategy": FSDP2Config(mp_policy=FULL), "optimizers": ("sgd",), **options}
    assert_parity(
        parity_case, world_size=world_size, parallelism_sizes=ParallelismSizes(**sizes), **options
    )


models = pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])


def meshes(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mesh", names)


@meshes("ep 2", "ep 4", "ep 2 x shard 2", "hsdp 2x2, ep 2", "hsdp 2x2, ep 4")
@models
def test_training_has_the_numbers_of_one_process(name: str, mesh: str) -> None:
    run(case(name), mesh, optimizers=("sgd", "adamw"), clip=0.5)


@meshes("tp 2, ep 2", "tp 2, ep 4")
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "ernie"])
def test_p26_tensor_parallelism_without_a_plan(
    name: str, sequence_parallel: bool, mesh: str
) -> None:
    """Attention and dense layers are split by the default plan, tokens before they are routed."""
    config = FSDP2Config(sequence_parallel=sequence_parallel, mp_policy=FULL)
    run(case(name), mesh, strategy=config)


@meshes("ep 2 x shard 2")
@pytest.mark.parametrize("mode", ["full", "selective"])
@models
def test_recomputed_blocks(name: str, mode: str, mesh: str) -> None:
    run(case(name), mesh, setup={"activation_checkpointing": mode})


@meshes("ep 2")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_every_implementation_of_experts(name: str, implementation: str, mesh: str) -> None:
    run(case(name, experts_implementation=implementation), mesh)


class DrawnRouter(nn.Module):
    """Sends every token to experts 0 and 1, which one rank holds."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        index = torch.tensor([0, 1]).expand(len(tokens), 2)
        return tokens, tokens[:, :2].sigmoid(), index


def drawn(name: str, **sizes: Any) -> nn.Module:
    model = build(name, **sizes)
    for layer in model.model.layers:
        layer.mlp.gate = DrawnRouter()
    return model


@meshes("ep 4", "ep 2 x shard 2")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_b47_ranks_whose_experts_get_no_token(mesh: str, implementation: str) -> None:
    """Without tokens a rank must take part in every exchange, and have zero gradients."""
    parity_case = ParityCase(
        model=partial(drawn, "mixtral", experts_implementation=implementation),
        batches=TokenBatches(vocabulary=61),
    )
    run(parity_case, mesh, setup={"activation_checkpointing": "full"})


@meshes("ep 2 x shard 2")
@pytest.mark.parametrize("start", ["checkpoint", "init"])
@models
def test_a_start_on_the_meta_device(name: str, start: str, mesh: str) -> None:
    parity_case = ParityCase(
        model=partial(MODELS[name]), batches=TokenBatches(vocabulary=61), init=fill
    )
    run(parity_case, mesh, meta_start=start)


ISLANDS = {"deepseek_v3": ("*.gate.weight",)}


@meshes("ep 2")
@models
def test_bf16_compute_with_fp32_islands(name: str, mesh: str) -> None:
    """A router that its model keeps in fp32 computes in it.

    A token's experts on each rank are summed and rounded to bf16 on their way back, and one process
    rounds the sum of all.
    """
    bf16 = Bf16(islands=ISLANDS.get(name, ()))
    tolerance = Tolerance(relative=5e-2, update=5e-2)
    run(case(name, micro_batches=1), mesh, strategy="fsdp2", bf16=bf16, tolerance=tolerance)


def adapted(name: str) -> nn.Module:
    return with_adapters(build(name), target_modules=["q_proj", "v_proj"])


@meshes("ep 2 x shard 2", "tp 2, ep 2")
def test_adapters_on_attention(mesh: str) -> None:
    parity_case = ParityCase(model=partial(adapted, "mixtral"), batches=TokenBatches(vocabulary=61))
    run(parity_case, mesh)
