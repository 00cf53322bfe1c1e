"""Tensor parallelism on models of transformers and a plain stack: the numbers of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwalk.mesh import FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core.testing import ParityCase, TokenBatches, assert_parity
from tests.matrix.plain_stack import PlainStack, plain_stack, uniform_weights
from tests.matrix.tiny_transformers import MODELS, SIZES, normal_weights

MESHES = {
    "fsdp 2": (2, {"tp_size": 1}),
    "tp 2": (2, {"tp_size": 2}),
    "tp 4": (4, {"tp_size": 4}),
    "tp 2 x fsdp 2": (4, {"tp_size": 2}),
    "tp 2 x hsdp 2x2": (8, {"tp_size": 2, "dp_replicate_size": 2}),
}


def build(name: str, tied: bool, kv_heads: int) -> nn.Module:
    if name == "plain":
        return plain_stack(tied)
    return MODELS[name](tied, num_key_value_heads=kv_heads)


def case(name: str, tied: bool, mesh: str, length: int = 11, micro_batches: int = 1) -> ParityCase:
    kv_heads = 4 if mesh == "tp 4" else SIZES["num_key_value_heads"]
    return ParityCase(
        model=partial(build, name, tied, kv_heads),
        batches=TokenBatches(vocabulary=61, length=length, micro_batches=micro_batches),
        init=uniform_weights if name == "plain" else normal_weights,
    )


def run(parity_case: ParityCase, mesh: str, *, sequence_parallel: bool, **options: object) -> None:
    world_size, sizes = MESHES[mesh]
    config = FSDP2Config(
        sequence_parallel=sequence_parallel, mp_policy={"param_dtype": None, "reduce_dtype": None}
    )
    options = {"strategy": config, **options}
    assert_parity(
        parity_case, world_size=world_size, parallelism_sizes=ParallelismSizes(**sizes), **options
    )


ties = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
models = pytest.mark.parametrize("name", ["plain", *MODELS])
sequences = pytest.mark.parametrize(
    "sequence_parallel", [False, True], ids=["whole sequences", "split sequences"]
)


@pytest.mark.pairwise
@sequences
@ties
@models
@pytest.mark.parametrize("mesh", ["tp 2 x fsdp 2", "tp 4"])
def test_training_has_the_numbers_of_one_process(
    mesh: str, name: str, tied: bool, sequence_parallel: bool
) -> None:
    run(case(name, tied, mesh), mesh, sequence_parallel=sequence_parallel)


@sequences
def test_replicas_of_a_tensor_parallel_model(sequence_parallel: bool) -> None:
    mesh = "tp 2 x hsdp 2x2"
    run(case("qwen3", True, mesh), mesh, sequence_parallel=sequence_parallel)


@pytest.mark.pairwise
@sequences
@pytest.mark.parametrize("length", [7, 3, 5, 8])
@pytest.mark.parametrize("mesh", ["tp 2", "tp 4"])
def test_any_length_of_a_sequence(mesh: str, length: int, sequence_parallel: bool) -> None:
    run(
        case("plain", False, mesh, length, micro_batches=2),
        mesh,
        sequence_parallel=sequence_parallel,
        optimizers=("sgd",),
    )


@sequences
@models
def test_three_micro_batches_with_unequal_token_counts(name: str, sequence_parallel: bool) -> None:
    mesh = "tp 2 x fsdp 2"
    parity_case = case(name, True, mesh, micro_batches=3)
    run(
        parity_case,
        mesh,
        sequence_parallel=sequence_parallel,
        clip=0.5,
        optimizers=("adamw",),
    )


@pytest.mark.parametrize("start", ["checkpoint", "init"])
@models
def test_a_start_on_the_meta_device(name: str, start: str) -> None:
    mesh = "tp 2 x fsdp 2"
    run(
        case(name, True, mesh),
        mesh,
        sequence_parallel=True,
        meta_start=start,
        optimizers=("adamw",),
    )


@pytest.mark.pairwise
@sequences
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("name", ["plain", "gemma3"])
def test_recomputed_blocks_have_the_numbers_of_one_process(
    name: str, mode: str, sequence_parallel: bool
) -> None:
    mesh = "tp 2 x fsdp 2"
    run(
        case(name, True, mesh, micro_batches=2),
        mesh,
        sequence_parallel=sequence_parallel,
        setup={"activation_checkpointing": mode},
        optimizers=("sgd",),
    )


def sharing_stack() -> nn.Module:
    """Blocks that hold the attention, a norm or one matrix of another, beside tied tables."""
    model = PlainStack(tied=True, layers=4)
    first, second, third, fourth = model.layers
    third.attention = first.attention
    second.attention_norm = first.attention_norm
    fourth.feed_forward.up_proj = second.feed_forward.up_proj
    return model


@sequences
@pytest.mark.parametrize("mesh", ["tp 2 x fsdp 2", "tp 2 x hsdp 2x2"])
def test_modules_that_several_blocks_share(mesh: str, sequence_parallel: bool) -> None:
    parity_case = ParityCase(
        model=sharing_stack,
        batches=TokenBatches(vocabulary=61, length=11, micro_batches=2),
        init=uniform_weights,
    )
    run(parity_case, mesh, sequence_parallel=sequence_parallel, optimizers=("adamw",))


class ScaledStack(PlainStack):
    """Logits with a scale, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.scale


def scaled_weights(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.ndim:
        uniform_weights(name, tensor, generator)
    else:
        tensor.fill_(0.7)


def pinned_stack() -> nn.Module:
    """Parameters that stay whole over data parallelism: cut, whole and summed over the tp axis."""
    model = ScaledStack()
    model._keep_in_fp32_modules_strict = [
        "attention_norm.bias",
        "ffn_norm.weight",
        "wq.bias",
        "wo.bias",
        "up_proj.bias",
        "k_norm.weight",
    ]
    return model


@pytest.mark.pairwise
@sequences
@pytest.mark.parametrize(
    ("mesh", "start"),
    [
        ("fsdp 2", None),
        ("tp 2", None),
        ("tp 2 x fsdp 2", None),
        ("tp 2 x fsdp 2", "checkpoint"),
        ("tp 2 x hsdp 2x2", "init"),
    ],
)
def test_parameters_that_stay_whole_beside_their_unit(
    mesh: str, start: str | None, sequence_parallel: bool
) -> None:
    """Pinned ones beside others, several in one block, and those without a dimension to shard."""
    parity_case = ParityCase(
        model=pinned_stack,
        batches=TokenBatches(vocabulary=61, length=11, micro_batches=2),
        init=scaled_weights,
    )
    options = {"meta_start": start} if start else {}
    run(parity_case, mesh, sequence_parallel=sequence_parallel, clip=0.5, **options)
