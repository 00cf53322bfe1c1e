"""Beam on every mesh: the numbers of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from beam_toys import FULL as NOT_SLIDING
from beam_toys import ROPE, SLIDING, beam_config, randomize
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.mesh import DistributedSetup, FSDP2Config, MeshContext, ParallelismSizes
from shardwalk.model_beam import BeamForCausalLM
from shardwalk.moe_ep import attach_router_bias_update
from shardwalk.moe_ep.router import find_gates
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.testing import ParityCase, assert_parity, cached, run_on_ranks

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "one rank": (1, {}),
    "fsdp 2": (2, {}),
    "hsdp 2x2": (4, {"dp_replicate_size": 2}),
    "tp 2": (2, {"tp_size": 2}),
    "tp 2, fsdp 2": (4, {"tp_size": 2}),
    "ep 2": (2, {"ep_size": 2}),
    "ep 2 x shard 2": (4, {"ep_size": 2}),
    "ep 4": (4, {"ep_size": 4}),
    "tp 2 = ep 2": (2, {"tp_size": 2, "ep_size": 2}),
    "tp 2, ep 2": (4, {"tp_size": 2, "ep_size": 2}),
}
FP32 = {"param_dtype": None, "reduce_dtype": None}
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, NOT_SLIDING],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "head_dim": 8,
    "sliding_window": 4,
    "moe_intermediate_size": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "biases, and rotation in full layers": {
        "attention_bias": True,
        "rope_parameters": {SLIDING: None, NOT_SLIDING: ROPE},
    },
    "dense": {"mlp_layer_types": ["dense"] * 3, "final_logit_softcapping": None},
}
SPARSE = [kind for kind in KINDS if kind != "dense"]


def beam(*, speed: float = 0.0, in_dict: bool = False, **changes: Any) -> BeamForCausalLM:
    model = BeamForCausalLM(beam_config(**{**SMALL, **changes}), bias_update_speed=speed)
    randomize(model)
    if in_dict:
        blocks = {f"block_{index}": block for index, block in enumerate(model.model.blocks)}
        model.model.layers = nn.ModuleDict(blocks)
    return model


@dataclass(frozen=True)
class Batches:
    """Rows that are padded at their end, or hold two sequences; labels fit neither.

    Attributes:
        packed: whether rows hold two sequences.
    """

    packed: bool = False
    rows: int = 8
    length: int = 11

    def __call__(self, step: int) -> Sequence[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(1000 + step)
        return [self._micro_batch(generator) for _ in range(2)]

    def _micro_batch(self, generator: torch.Generator) -> dict[str, Tensor]:
        tokens = torch.randint(61, (self.rows, self.length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        cuts = torch.randint(2, self.length + 1, (self.rows, 1), generator=generator)
        before = torch.arange(self.length) < cuts
        rows = {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}
        if self.packed:
            return {**rows, "sequence_ids": (~before).long()}
        labels[~before] = -100
        return {**rows, "attention_mask": before}


def token_losses(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    labels = rows["labels"]
    logits = model(**{name: value for name, value in rows.items() if name != "labels"}).logits
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels)


def run(mesh: str, *, packed: bool = False, strategy: Any = None, **options: Any) -> None:
    world_size, sizes = MESHES[mesh]
    kind, setup = options.pop("kind", {}), options.pop("setup", {})
    case = ParityCase(
        model=partial(beam, **kind), batches=Batches(packed), token_losses=token_losses
    )
    assert_parity(
        case,
        world_size=world_size,
        parallelism_sizes=ParallelismSizes(**sizes),
        strategy=FSDP2Config(mp_policy=FP32, **(strategy or {})),
        setup=setup,
        **{"optimizers": ("sgd",), **options},
    )


def meshes(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mesh", names)


@meshes(*MESHES)
def test_training_has_the_numbers_of_one_process(mesh: str) -> None:
    run(mesh)


@pytest.mark.parametrize("mode", ["full", "selective"])
@meshes("hsdp 2x2", "tp 2", "ep 2 x shard 2", "tp 2, ep 2")
def test_recomputed_blocks(mesh: str, mode: str) -> None:
    run(mesh, setup={"activation_checkpointing": mode})


@pytest.mark.parametrize("mode", [False, "selective"])
@meshes("tp 2", "tp 2, ep 2")
def test_hidden_states_split_over_the_sequence(mesh: str, mode: Any) -> None:
    strategy = {"sequence_parallel": True}
    run(mesh, strategy=strategy, setup={"activation_checkpointing": mode})


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [*((kind, "tp 2, fsdp 2") for kind in KINDS), *((kind, "tp 2, ep 2") for kind in SPARSE)],
)
def test_every_kind_of_layer(kind: str, mesh: str) -> None:
    run(mesh, kind=KINDS[kind], strategy={"sequence_parallel": kind == "dense"})


@meshes("hsdp 2x2", "tp 2, ep 2")
def test_packed_sequences_and_blocks_in_a_dict(mesh: str) -> None:
    run(mesh, packed=True, kind={"in_dict": True}, clip=0.5, optimizers=("adamw",))


def test_experts_apart_without_an_ep_axis() -> None:
    run("tp 2, fsdp 2", setup={"moe_parallel_config": {}})


def context(mesh: str, checkpointing: Any) -> MeshContext:
    sizes = ParallelismSizes(**MESHES[mesh][1])
    made = cached(
        ("beam parity", mesh),
        lambda: DistributedSetup.build("fsdp2", parallelism_sizes=sizes).mesh_context,
    )
    return MeshContext.from_meshes(
        made.device_mesh,
        made.moe_mesh,
        strategy_config=FSDP2Config(mp_policy=FP32),
        activation_checkpointing=checkpointing,
    )


def biases_after_steps(model: nn.Module, part: int, of: int) -> list[Tensor]:
    """The correction biases of this rank after three steps of two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attach_router_bias_update(model, optimizer)
    for step in range(3):
        for rows in Batches()(step):
            own = {name: value.tensor_split(of)[part] for name, value in rows.items()}
            (token_losses(model, own).sum() * (of / 100)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [gate.e_score_correction_bias for gate in find_gates(model)]
    return [getattr(bias, "to_local", lambda bias=bias: bias)().clone() for bias in found]


def router_biases(mesh: str, checkpointing: Any) -> list[Tensor]:
    mesh_context = context(mesh, checkpointing)
    model = parallelize_model(beam(speed=0.01), mesh_context)
    return biases_after_steps(model, mesh_context.data_rank, mesh_context.data_world_size)


@pytest.mark.parametrize(
    ("mesh", "checkpointing"),
    [("fsdp 2", False), ("tp 2", "full"), ("ep 4", "selective"), ("tp 2, ep 2", False)],
)
def test_router_biases_follow_the_loads_of_all_ranks(mesh: str, checkpointing: Any) -> None:
    """The same bits on every rank, and as in one process."""
    whole = beam(speed=0.01)
    start = [gate.e_score_correction_bias.clone() for gate in find_gates(whole)]
    expected = biases_after_steps(whole, 0, 1)
    assert not any(torch.equal(*pair) for pair in zip(start, expected, strict=True))
    for found in run_on_ranks(MESHES[mesh][0], router_biases, mesh, checkpointing):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
