"""The model of 501 billion parameters on 1024 ranks, planned on one CPU without any of them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORLD, EP, EP_SHARD = 1024, 64, 16
LAYERS, DENSE, HIDDEN, VOCAB = 52, 3, 5120, 151936
EXPERTS, INNER, DENSE_INNER = 256, 2560, 20480
HEADS, KV_HEADS, HEAD = 48, 8, 128
# Layers are alike, so that the other ranks need only one sparse one.
RANKS = [(0, LAYERS), *((rank, 4) for rank in (1, 63, 64, 777, 1019, 1023))]

ATTENTION = {
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "pre_feedforward_layernorm.weight": (HIDDEN,),
    "post_feedforward_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.gate_proj.weight": (HEADS * HEAD, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "self_attn.q_norm.weight": (HEAD,),
    "self_attn.k_norm.weight": (HEAD,),
    "self_attn.gate_bias": (HEADS,),
}
MLP = {
    "mlp.gate_proj.weight": (DENSE_INNER, HIDDEN),
    "mlp.up_proj.weight": (DENSE_INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, DENSE_INNER),
}
ROUTER = {"mlp.gate.weight": (EXPERTS, HIDDEN)}
ROUTER_BIAS = {"mlp.gate.e_score_correction_bias": (EXPERTS,)}
STACKED = {
    "mlp.experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
    "mlp.experts.down_proj": (EXPERTS, HIDDEN, INNER),
}

Shapes = dict[str, tuple[int, ...]]


def units_by_hand(layers: int) -> dict[str, tuple[str, Shapes]]:
    """The units by name, in order: the mesh of each, and the parameters in it."""
    everyone = f"dp_shard_cp {WORLD}"
    units: dict[str, tuple[str, Shapes]] = {
        "": (everyone, {"model.norm.weight": (HIDDEN,)}),
        "model.embed_tokens": (everyone, {"model.embed_tokens.weight": (VOCAB, HIDDEN)}),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        own = ATTENTION | (MLP if layer < DENSE else {})
        units[name] = everyone, below(name, own)
        if layer >= DENSE:
            units[f"{name}.mlp.gate"] = everyone, below(name, ROUTER)
            mesh = f"ep_shard {EP_SHARD} x ep {EP}"
            units[f"{name}.mlp.experts"] = mesh, below(name, STACKED)
    units["lm_head"] = everyone, {"lm_head.weight": (VOCAB, HIDDEN)}
    return units


def below(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def block_of(name: str, shape: tuple[int, ...], rank: int) -> list[tuple[int, int]]:
    """The start and stop of what a rank holds, per dimension."""
    whole = [(0, size) for size in shape]
    if name.endswith("e_score_correction_bias"):
        return whole
    if ".experts." in name:
        experts, rows = EXPERTS // EP, shape[1] // EP_SHARD
        first, row = rank % EP * experts, rank // EP * rows
        return [(first, first + experts), (row, row + rows), whole[2]]
    chunk = math.ceil(shape[0] / WORLD)
    start = min(rank * chunk, shape[0])
    return [(start, min(start + chunk, shape[0])), *whole[1:]]


def dtype_of(name: str) -> str:
    return "float32" if "mlp.gate." in name else "bfloat16"


def bytes_of(name: str, shape: tuple[int, ...], rank: int) -> int:
    sizes = [stop - start for start, stop in block_of(name, shape, rank)]
    return math.prod(sizes) * (4 if dtype_of(name) == "float32" else 2)


@pytest.fixture(scope="module")
def plans() -> list[dict[str, Any]]:
    script = Path(__file__).with_name("beam_plan.py")
    ranks = [f"{rank}:{layers}" for rank, layers in RANKS]
    command = [sys.executable, str(script), str(WORLD), str(EP), *ranks]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_one_cpu_plans_501_billion_parameters(plans) -> None:
    """In well under a minute and 6 GB."""
    whole = plans[0]
    print(*(f"{key}={whole[key]:.3g}" for key in ("seconds", "cpu_seconds", "peak_bytes")))
    assert whole["seconds"] < 60
    assert whole["cpu_seconds"] < 20
    assert whole["peak_bytes"] < 1e9
    assert {tensor["device"] for tensor in whole["tensors"].values()} == {"meta"}
    attention = 2 * (HEADS + KV_HEADS) * HEAD * HIDDEN + HEADS * HEAD * HIDDEN
    attention += 4 * HIDDEN + 2 * HEAD + HEADS
    dense, sparse = 3 * DENSE_INNER * HIDDEN, EXPERTS * (3 * INNER * HIDDEN + HIDDEN)
    total = 2 * VOCAB * HIDDEN + HIDDEN + LAYERS * attention + DENSE * dense
    total += (LAYERS - DENSE) * sparse
    assert total == 501_267_599_808
    assert sum(unit["parameters"] for unit in whole["units"]) == total


@pytest.mark.parametrize("index", range(len(RANKS)), ids=[f"rank {rank}" for rank, _ in RANKS])
def test_units_are_those_computed_by_hand(index, plans) -> None:
    rank, layers = RANKS[index]
    expected = [
        {
            "name": name,
            "parameters": sum(math.prod(shape) for shape in shapes.values()),
            "dtypes": [dtype_of(next(iter(shapes)))],
            "mesh": mesh,
            "bytes_per_rank": sum(bytes_of(n, shape, rank) for n, shape in shapes.items()),
        }
        for name, (mesh, shapes) in units_by_hand(layers).items()
    ]
    assert plans[index]["units"] == expected


@pytest.mark.parametrize("index", range(len(RANKS)), ids=[f"rank {rank}" for rank, _ in RANKS])
def test_every_tensor_is_cut_as_computed_by_hand(index, plans) -> None:
    rank, layers = RANKS[index]
    shapes = {n: s for _, unit in units_by_hand(layers).values() for n, s in unit.items()}
    for layer in range(DENSE, layers):
        shapes |= below(f"model.layers.{layer}", ROUTER_BIAS)
    tensors = plans[index]["tensors"]
    assert tensors.keys() == shapes.keys()
    for name, shape in shapes.items():
        block = block_of(name, shape, rank)
        size = [stop - start for start, stop in block]
        assert tensors[name]["shape"] == list(shape), name
        assert tensors[name]["dtype"] == f"torch.{dtype_of(name)}", name
        assert tensors[name]["size"] == size, name
        start = [start for start, _ in block] if all(size) else None
        assert tensors[name]["start"] == start, name


def test_the_blocks_of_all_ranks_are_each_expert_once() -> None:
    """What the above compares with, over all 1024 ranks."""
    for name, shape in STACKED.items():
        blocks = {tuple(block_of(name, shape, rank)) for rank in range(WORLD)}
        assert len(blocks) == WORLD
        assert sum(math.prod(b - a for a, b in block) for block in blocks) == math.prod(shape)
        held = [
            {block[0] for block in blocks if block[0][0] <= e < block[0][1]} for e in range(256)
        ]
        assert all(len(owners) == 1 for owners in held)
    assert block_of("mlp.experts.down_proj", (256, 5120, 2560), 777) == [
        (36, 40),  # 777 = 12 * 64 + 9
        (3840, 4160),
        (0, 2560),
    ]
