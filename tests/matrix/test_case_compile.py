"""B60: compiled blocks, dense and with experts, under every kind of checkpointing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from shardwalk.mesh import (
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    MoEParallelizerConfig,
    ParallelismSizes,
)
from shardwalk.parallelizer_core import (
    CompiledBlocks,
    compile_parallelized_model,
    describe_compiled,
    parallelize_model,
)
from shardwalk.parallelizer_core.testing import cached, run_on_ranks
from tests.matrix.case_models import FULL, assert_equal, gradients, mean_loss, mine, tokens
from tests.matrix.plain_moe import MoEStack
from tests.matrix.tiny_transformers import MODELS

LENGTHS = (8, 11)


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MoEStack(1) if name == "experts" else MODELS[name](False)


def context(name: str, **options: Any) -> MeshContext:
    moe = MoEParallelizerConfig() if name == "experts" else None
    sizes = ParallelismSizes(ep_size=2 if moe else 1)
    made = cached(
        ("compile", name), lambda: DistributedSetup.build("fsdp2", sizes, moe_parallel_config=moe)
    ).mesh_context
    return MeshContext.from_meshes(
        made.device_mesh,
        made.moe_mesh,
        strategy_config=FSDP2Config(mp_policy=FULL, **options),
        moe_parallel_config=moe,
    )


def steps(name: str, mode: Any, backend: str | None) -> tuple[list[Any], list[CompiledBlocks]]:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch's own, in inductor
    made = context(name, activation_checkpointing=mode, enable_compile=backend is not None)
    model = parallelize_model(build(name), made)
    compile_parallelized_model(model, made, backend=backend)
    found = []
    for length in LENGTHS:
        mean_loss(model, mine(tokens(length=length))).backward()
        found.append(gradients(model))
        model.zero_grad()
    return found, describe_compiled(model)


def run(name: str, mode: Any, backend: str = "aot_eager") -> list[CompiledBlocks]:
    plain, _ = run_on_ranks(2, steps, name, mode, None)[0]
    compiled, kinds = run_on_ranks(2, steps, name, mode, backend, timeout=200.0)[0]
    for found, expected in zip(compiled, plain, strict=True):
        assert_equal(found, expected)
    assert all(kind.runs > 0 for kind in kinds)
    # Each piece is recompiled once: for all lengths after the first.
    assert all(kind.graphs <= 2 * (1 + len(kind.breaks)) for kind in kinds)
    return kinds


MODES = [
    pytest.param(False, marks=pytest.mark.widest),
    "full",
    pytest.param("selective", marks=pytest.mark.widest),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", MODES)
def test_blocks_with_experts_are_compiled_around_them(mode: Any) -> None:
    """P14: the strategy's option holds for a model with experts."""
    dense, sparse, *parts = run("experts", mode)
    assert (dense.name, sparse.name) == ("layers.0", "layers.1")
    assert dense.whole
    assert dict(sparse.breaks)["mlp"].startswith("records decisions")
    assert [part.name for part in parts] == (["layers.1.attention"] if mode else [])
    assert all(part.whole for part in parts)


@pytest.mark.widest
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", [False, "full", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, mode: Any) -> None:
    (blocks,) = run(name, mode)
    assert blocks.whole


@pytest.mark.widest
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", [False, "selective"])
def test_the_compiler_that_is_used_without_a_choice(mode: Any) -> None:
    (blocks,) = run("llama", mode, "inductor")
    assert blocks.whole
