"""Saving, exporting, generating and `zero_grad` on a tensor-parallel mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from shardwalk.mesh import DistributedSetup, FSDP2Config, MeshContext, ParallelismSizes
from shardwalk.parallelizer_core import (
    clip_grad_norm_,
    export_safetensors,
    load_checkpoint,
    model_state_dict,
    parallelize_model,
    save_checkpoint,
)
from shardwalk.parallelizer_core.testing import cached, run_on_ranks
from tests.matrix.tiny_transformers import MODELS

FULL = {"param_dtype": None, "reduce_dtype": None}
SIZES: dict[str, dict[str, int]] = {
    "tp 2 x fsdp 2": {"tp_size": 2},
    "fsdp 4": {},
    "tp 2 x hsdp 2": {"tp_size": 2, "dp_replicate_size": 2},
}


def context(mesh: str, **strategy: Any) -> MeshContext:
    made = cached(
        ("tp state", mesh),
        lambda: (
            DistributedSetup.build(
                "fsdp2", parallelism_sizes=ParallelismSizes(**SIZES[mesh])
            ).mesh_context
        ),
    )
    config = FSDP2Config(**{"mp_policy": FULL, **strategy})
    return MeshContext.from_meshes(made.device_mesh, strategy_config=config)


def built(name: str, mesh: str, *, seed: int = 0, **strategy: Any) -> nn.Module:
    torch.manual_seed(seed)
    return parallelize_model(MODELS[name](True), context(mesh, **strategy))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on the same rows for every rank; its loss."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 61, (2, 8), generator=generator)
    logits = model(ids[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def uninterrupted(folder: str, mesh: str, sequence_parallel: bool) -> list[float]:
    model = built("qwen3", mesh, sequence_parallel=sequence_parallel)
    optimizer = adamw(model)
    losses = [train(model, optimizer, step) for step in range(2)]
    save_checkpoint(folder, model, optimizer, step=2)
    return losses + [train(model, optimizer, step) for step in (2, 3)]


def resumed(folder: str, mesh: str) -> list[float]:
    model = built("qwen3", mesh, seed=1)
    optimizer = adamw(model)
    assert load_checkpoint(folder, model, optimizer).step == 2
    return [train(model, optimizer, step) for step in (2, 3)]


@pytest.mark.parametrize(
    ("before", "after"),
    [("tp 2 x fsdp 2", "fsdp 4"), ("fsdp 4", "tp 2 x fsdp 2"), ("tp 2 x hsdp 2", "tp 2 x fsdp 2")],
)
def test_training_resumes_on_another_mesh(before: str, after: str, tmp_path: Path) -> None:
    losses = run_on_ranks(4, uninterrupted, str(tmp_path), before, before.startswith("tp"))[0]
    for continued in run_on_ranks(4, resumed, str(tmp_path), after):
        assert continued == pytest.approx(losses[2:], rel=1e-6)


def exported(name: str, folder: str) -> bool:
    torch.manual_seed(0)
    whole = MODELS[name](True)
    model = parallelize_model(MODELS[name](True), context("tp 2 x fsdp 2"))
    # As `whole`: both were built from one seed only when the second reads the first's values.
    for parameter, value in model_state_dict(model, full=True).items():
        whole.state_dict()[parameter].copy_(value)
    export_safetensors(model, folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.arange(1, 13).view(2, 6)
    return torch.equal(loaded(ids).logits, whole(ids).logits)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_a_tensor_parallel_model_exported(
    name: str, tmp_path: Path
) -> None:
    assert all(run_on_ranks(4, exported, name, str(tmp_path)))


def new_tokens(model: nn.Module, data_rank: int) -> Tensor:
    """Ranks of one replica read the same prompt; replicas stop after other numbers of tokens."""
    ids = torch.arange(1, 2 * (4 + data_rank) + 1).view(2, 4 + data_rank)
    found: Tensor = model.generate(ids, do_sample=False, max_new_tokens=4 + 3 * data_rank)
    return found


def generated(name: str, sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    model = built(name, "tp 2 x fsdp 2", sequence_parallel=sequence_parallel)
    torch.manual_seed(0)
    whole = MODELS[name](True).eval()
    data_rank = context("tp 2 x fsdp 2").data_rank
    own = new_tokens(model.eval(), data_rank)
    dist.barrier()
    return own, new_tokens(whole, data_rank)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_gives_the_tokens_of_one_process(name: str, sequence_parallel: bool) -> None:
    for own, expected in run_on_ranks(4, generated, name, sequence_parallel):
        assert torch.equal(own, expected)


def recomputed_gradients(mode: bool | str, sequence_parallel: bool) -> dict[str, Tensor]:
    mesh = context(
        "tp 2 x fsdp 2", mp_policy=None, sequence_parallel=sequence_parallel,
        activation_checkpointing=mode,
    )  # fmt: skip
    torch.manual_seed(0)
    model = parallelize_model(MODELS["qwen3"](True), mesh)
    model(torch.arange(1, 15).view(2, 7)).logits.float().logsumexp(-1).sum().backward()
    return {name: p.grad.to_local() for name, p in model.named_parameters()}


def recomputation_differs(mode: str, sequence_parallel: bool) -> list[str]:
    kept = recomputed_gradients(False, sequence_parallel)
    again = recomputed_gradients(mode, sequence_parallel)
    return [name for name, gradient in kept.items() if not torch.equal(gradient, again[name])]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_no_bit_of_a_bf16_gradient(
    mode: str, sequence_parallel: bool
) -> None:
    assert run_on_ranks(4, recomputation_differs, mode, sequence_parallel) == [[]] * 4


def gradients_of_two_steps(between: bool) -> dict[str, Tensor]:
    model = built("qwen3", "tp 2 x fsdp 2")
    for _ in range(2):
        if not between:
            model.zero_grad()
        loss = model(torch.arange(1, 13).view(2, 6)).logits.square().mean()
        if between:
            model.zero_grad()
        loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_zero_grad_between_forward_and_backward_reaches_the_shards() -> None:
    expected = run_on_ranks(4, gradients_of_two_steps, False)[0]
    for gradients in run_on_ranks(4, gradients_of_two_steps, True):
        assert all(torch.equal(gradients[name], value) for name, value in expected.items())
