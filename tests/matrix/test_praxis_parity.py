"""The Praxis policy on meshes: the numbers of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

from shardwalk.mesh import FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.testing import Bf16, Subject, Tolerance, assert_parity
from tests.matrix.praxis_cases import praxis_case, sgd, take_inputs_as_units_do

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "one rank": (1, {}),
    "fsdp 2": (2, {}),
    "fsdp 4": (4, {}),
    "hsdp 2x2": (4, {"dp_replicate_size": 2}),
    "ep 2": (2, {"ep_size": 2}),
    "ep 2 x shard 2": (4, {"ep_size": 2}),
    "ep 4": (4, {"ep_size": 4}),
    "hsdp 2x2, ep 2": (4, {"ep_size": 2, "dp_replicate_size": 2}),
}
# What poses and future tokens learn comes through other tokens alone, in small sums of large terms.
FP32 = Tolerance(relative=2e-5)
FULL = {"param_dtype": None, "reduce_dtype": None}
BF16: dict[str, Any] = {
    "strategy": "fsdp2",
    "bf16": Bf16(islands=("*.gate.weight",), prepare=take_inputs_as_units_do),
    "optimizers": ("sgd",),
}
# On an ep axis an expert's weights get the gradient of all its tokens in one product, rounded once;
# the reference rounds those of each rank's tokens.
ROUNDED_ONCE = Tolerance(relative=5e-3, update=1e-2)
BF16_MESHES = pytest.mark.parametrize(
    ("mesh", "tolerance"), [("fsdp 2", None), ("ep 2 x shard 2", ROUNDED_ONCE)]
)


def run(mesh: str, case: Any = None, **options: Any) -> None:
    world_size, sizes = MESHES[mesh]
    fp32 = {"strategy": FSDP2Config(mp_policy=FULL), "optimizers": (sgd,), "tolerance": FP32}
    options = {**fp32, **options}
    assert_parity(
        case or praxis_case(),
        world_size=world_size,
        parallelism_sizes=ParallelismSizes(**sizes),
        **options,
    )


def parallelize_quietly(model: nn.Module, setup: Any) -> nn.Module:
    """Without the warning that recomputes route anew."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*recomputes route tokens anew")
        return parallelize_model(model, setup.mesh_context)


KEPT: dict[str, Any] = {}
SELECTIVE = {"activation_checkpointing": "selective"}
RECOMPUTED = {"activation_checkpointing": "full"}
ROUTED_ANEW = RECOMPUTED | {"moe_parallel_config": {"ignore_router_for_ac": False}}


@pytest.mark.parametrize(
    ("mesh", "setup"),
    [
        ("one rank", RECOMPUTED),
        ("fsdp 2", KEPT),
        ("fsdp 4", RECOMPUTED),
        ("hsdp 2x2", SELECTIVE),
        ("ep 2", KEPT),
        ("ep 2", ROUTED_ANEW),
        ("ep 2 x shard 2", RECOMPUTED),
        ("ep 4", KEPT),
        ("hsdp 2x2, ep 2", RECOMPUTED),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_training_has_the_numbers_of_one_process(mesh: str, setup: dict[str, Any]) -> None:
    """Three steps with a balance loss, biases of routers that follow the loads, and clipping."""
    subject = Subject(parallelize=parallelize_quietly)
    case = praxis_case(micro_batches=1)
    run(mesh, case, setup=setup, subject=subject, steps=3, clip=0.5)


@BF16_MESHES
def test_bf16_has_the_numbers_of_one_process(mesh: str, tolerance: Tolerance | None) -> None:
    run(mesh, praxis_case(fixed_routes=True), setup=RECOMPUTED, tolerance=tolerance, **BF16)


@pytest.mark.parametrize("mesh", ["one rank", "fsdp 2", "ep 2 x shard 2"])
def test_a_start_on_the_meta_device(mesh: str) -> None:
    """Weights are drawn for their names, and are the same bits on every mesh."""
    run(mesh, praxis_case(micro_batches=1), meta_start="init", steps=1)


@BF16_MESHES
def test_adapters_on_the_action_expert(mesh: str, tolerance: Tolerance | None) -> None:
    """Micro-steps without communication, while the decoder's units never run."""
    case = praxis_case(micro_batches=3, lora=True, fixed_routes=True)
    run(mesh, case, setup=RECOMPUTED, tolerance=tolerance, **BF16)
