"""Expert parallelism on a plain decoder: the numbers of one process on every mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from shardwalk.mesh import FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core.testing import (
    Bf16,
    ParityCase,
    TokenBatches,
    Tolerance,
    assert_parity,
)
from tests.matrix.plain_moe import MoEStack

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "ep 2": (2, {"ep_size": 2}),
    "ep 4": (4, {"ep_size": 4}),
    "ep 2 x shard 2": (4, {"ep_size": 2}),
    "hsdp 2x2, ep 2": (4, {"ep_size": 2, "dp_replicate_size": 2}),
    "hsdp 2x2, ep 4": (4, {"ep_size": 4, "dp_replicate_size": 2}),
    "hsdp 2 x ep 2 x shard 2": (8, {"ep_size": 2, "dp_replicate_size": 2}),
    "tp 2 = ep 2": (2, {"tp_size": 2, "ep_size": 2}),
    "tp 2, ep 2": (4, {"tp_size": 2, "ep_size": 2}),
    "tp 2, ep 4": (4, {"tp_size": 2, "ep_size": 4}),
}
FULL = {"param_dtype": None, "reduce_dtype": None}
# The weights of an expert get the gradient of all its tokens in one product, rounded once; the
# reference rounds those of each rank's tokens.
BF16: dict[str, Any] = {
    "strategy": "fsdp2",
    "bf16": Bf16(islands=("*.gate.weight",)),
    "tolerance": Tolerance(relative=5e-3, update=1e-2),
}
LAYERS: dict[str, dict[str, Any]] = {
    "groups, biases and shared experts": {
        "score_function": "sigmoid",
        "correction_bias": True,
        "num_groups": 4,
        "top_k_groups": 2,
        "num_shared_experts": 1,
        "shared_gate": True,
        "scaling_factor": 2.5,
    },
    "a latent width": {"latent_size": 8, "num_shared_experts": 2},
    "biased experts": {"activation": "swiglu_oai", "expert_bias": True, "router_bias": True},
    "a frozen router": {"frozen": ("gate.weight",)},
    "one expert for each token": {"top_k": 1, "normalize_weights": False},
}


def case(micro_batches: int = 1, *, rows: int = 8, length: int = 11, **options: Any) -> ParityCase:
    return ParityCase(
        model=partial(MoEStack, **options),
        batches=TokenBatches(vocabulary=61, rows=rows, length=length, micro_batches=micro_batches),
    )


def run(parity_case: ParityCase, mesh: str, **options: Any) -> None:
    world_size, sizes = MESHES[mesh]
    options = {"strategy": FSDP2Config(mp_policy=FULL), "optimizers": ("sgd",), **options}
    assert_parity(
        parity_case, world_size=world_size, parallelism_sizes=ParallelismSizes(**sizes), **options
    )


def meshes(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mesh", names)


@meshes(*MESHES)
def test_training_has_the_numbers_of_one_process(mesh: str) -> None:
    run(case(micro_batches=2), mesh, optimizers=("sgd", "adamw"), clip=0.5)


@meshes("ep 2 x shard 2", "tp 2, ep 2")
@pytest.mark.parametrize("layer", LAYERS)
def test_every_kind_of_layer(layer: str, mesh: str) -> None:
    run(case(micro_batches=2, **LAYERS[layer]), mesh)


@pytest.mark.pairwise
@pytest.mark.parametrize("length", [11, 3, 1])
@meshes("tp 2 = ep 2", "tp 2, ep 2", "tp 2, ep 4")
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
def test_tokens_split_over_tp(mesh: str, length: int, sequence_parallel: bool) -> None:
    """Eleven tokens, three, and one: some ranks of the axis have none then."""
    strategy = FSDP2Config(sequence_parallel=sequence_parallel, mp_policy=FULL)
    options = LAYERS["groups, biases and shared experts"] | {"frozen": _ZERO_ALONE[length == 1]}
    parity_case = ParityCase(
        model=partial(MoEStack, **options), batches=partial(_all_valid, 8, length)
    )
    run(parity_case, mesh, strategy=strategy)


# A token that attends to itself alone leaves queries and keys with gradients of rounding errors.
_ZERO_ALONE = ((), ("wq", "wk", "q_norm", "k_norm"))


def _all_valid(rows: int, length: int, step: int) -> Sequence[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(61, (rows, length + 1), generator=generator)
    return [{"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}]


@pytest.mark.parametrize("rows", [6, 3, 1])
@meshes("ep 4", "ep 2 x shard 2")
def test_uneven_rows_per_rank(mesh: str, rows: int) -> None:
    """Ranks with more rows than others, and ranks with none."""
    run(ParityCase(model=MoEStack, batches=partial(_all_valid, rows, 5)), mesh)


@meshes("ep 4", "tp 2, ep 4")
def test_one_token_in_all(mesh: str) -> None:
    model = partial(MoEStack, frozen=_ZERO_ALONE[True])
    run(ParityCase(model=model, batches=partial(_all_valid, 1, 1)), mesh)


class Drawn(MoEStack):
    """Every token goes to experts 0 and 1, which one rank holds."""

    def __init__(self) -> None:
        super().__init__(top_k=2, score_function="sigmoid", correction_bias=True)
        for layer in list(self.layers)[1:]:
            layer.mlp.gate.e_score_correction_bias.copy_(torch.tensor([9.0, 8, *[0] * 6]))


@pytest.mark.pairwise
@meshes("ep 2", "ep 4", "ep 2 x shard 2")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", [False, "full"], ids=["kept", "recomputed"])
def test_b47_ranks_whose_experts_get_no_token(mesh: str, dtype: str, mode: Any) -> None:
    """Without tokens a rank must take part in every exchange, and have zero gradients."""
    options: dict[str, Any] = {"setup": {"activation_checkpointing": mode}}
    if dtype == "bf16":
        options |= BF16
    run(ParityCase(model=Drawn, batches=partial(_all_valid, 8, 5)), mesh, **options)


@pytest.mark.pairwise
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@meshes("ep 2 x shard 2", "hsdp 2x2, ep 4", "tp 2, ep 2")
def test_recomputed_blocks(mesh: str, mode: str, sequence_parallel: bool) -> None:
    if sequence_parallel and not mesh.startswith("tp"):
        pytest.skip("there is no sequence to split without tensor parallelism")
    run(
        case(micro_batches=2, **LAYERS["groups, biases and shared experts"]),
        mesh,
        strategy=FSDP2Config(mp_policy=FULL, sequence_parallel=sequence_parallel),
        setup={"activation_checkpointing": mode},
    )


@meshes("ep 2 x shard 2", "hsdp 2x2, ep 4", "tp 2, ep 2")
def test_bf16_compute_with_fp32_reduction(mesh: str) -> None:
    """Routers stay in fp32, with choices far from ties.

    The sums of a token's experts on each rank are rounded to bf16 on their way back, and one
    process rounds the sum of all; tensor parallelism rounds partial sums too.
    """
    options = BF16 | {"tolerance": Tolerance(relative=5e-2, floor=0.1, update=5e-2)}
    run(case(**LAYERS["a frozen router"]), mesh, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "resharded": {"reshard_after_forward": True},
    "kept gathered": {"reshard_after_forward": False},
    "prefetch": {"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": 2},
    "offload": {"offload_policy": {"pin_memory": False}},
    "sync every micro-batch": {"defer_fsdp_grad_sync": False},
}


@meshes("ep 2 x shard 2")
@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_changes_the_numbers(option: str, mesh: str) -> None:
    config = FSDP2Config(mp_policy=FULL, **OPTIONS[option])
    run(case(micro_batches=2), mesh, strategy=config)


MOE_OPTIONS: dict[str, dict[str, Any]] = {
    "resharded": {"reshard_after_forward": True},
    "an fp32 head": {"lm_head_precision": "float32"},
    "a policy of its own": {"mp_policy": FULL},
}


@meshes("ep 2 x shard 2")
@pytest.mark.parametrize("option", MOE_OPTIONS)
def test_no_option_for_experts_changes_the_numbers(option: str, mesh: str) -> None:
    run(case(micro_batches=2), mesh, setup={"moe_parallel_config": MOE_OPTIONS[option]})


def test_a_config_for_experts_without_an_ep_axis() -> None:
    """Experts are sharded over all ranks then, apart from their blocks."""
    assert_parity(
        case(micro_batches=2),
        world_size=4,
        parallelism_sizes=ParallelismSizes(tp_size=2),
        strategy=FSDP2Config(mp_policy=FULL),
        setup={"moe_parallel_config": {}},
        optimizers=("sgd",),
    )


@pytest.mark.parametrize("start", ["checkpoint", "init"])
def test_a_start_on_the_meta_device(start: str) -> None:
    parity_case = ParityCase(
        model=MoEStack, batches=TokenBatches(vocabulary=61), init="reset_parameters"
    )
    run(parity_case, "ep 2 x shard 2", meta_start=start, optimizers=("adamw",))
