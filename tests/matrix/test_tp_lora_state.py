"""Adapters on split layers: saved, resumed on another mesh, gathered, merged and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwalk.mesh import DistributedSetup, FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core import (
    load_checkpoint,
    model_state_dict,
    parallelize_model,
    save_checkpoint,
)
from shardwalk.parallelizer_core.testing import cached, run_on_ranks
from tests.matrix.case_models import FULL, logits_of, mean_loss, seeded, tokens, whole
from tests.matrix.lora_models import ignored_warnings, lora
from tests.matrix.tiny_transformers import MODELS

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj", "embed_tokens", "lm_head"]
TP: dict[str, int] = {"tp_size": 2}


def adapted() -> Any:
    return seeded(lora, layers=2, target_modules=TARGETS)


def parallel_on(sizes: dict[str, int]) -> Any:
    def make() -> Any:
        config = FSDP2Config(mp_policy=FULL)
        return DistributedSetup.build(config, parallelism_sizes=ParallelismSizes(**sizes))

    context = cached(("lora", tuple(sizes.items())), make).mesh_context
    return parallelize_model(adapted(), context)


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for seed in steps:
        optimizer.zero_grad()
        mean_loss(model, tokens(rows=4, seed=seed)).backward()
        optimizer.step()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def first_half(folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, the adapters gathered as the README does, the merged model."""
    model = parallel_on(TP)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    save_checkpoint(folder / "run", model, optimizer)
    before = logits_of(model, tokens()).detach()
    # Frees what the forward gathered, so that the merge changes the shards.
    state = model_state_dict(model)
    adapters = {n: t.full_tensor() for n, t in state.items() if ".lora_" in n}
    with ignored_warnings():
        model.merge_adapter()
        close(logits_of(model, tokens()).detach(), before)
        weights = {n: t.full_tensor() for n, t in model_state_dict(model).items()}
        model.unmerge_adapter()
    close(logits_of(model, tokens()).detach(), before)
    model_state_dict(model)
    with ignored_warnings():
        close(logits_of(model.merge_and_unload(), tokens()).detach(), before)
    return {"adapters": adapters, "logits": before, "merged": weights}


def second_half(folder: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    model = parallel_on(sizes)
    optimizer = adamw(model)
    load_checkpoint(folder / "run", model, optimizer)
    train(model, optimizer, range(2, 4))
    return {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_are_saved_resumed_gathered_and_merged(tmp_path: Path) -> None:
    """A run on one mesh goes on with another, and its adapters leave it as those of one process."""
    reference = adapted()
    optimizer = adamw(reference)
    train(reference, optimizer, range(2))
    logits = logits_of(reference, tokens()).detach()
    plain = adapted()
    for found in run_on_ranks(4, first_half, tmp_path):
        close(found["logits"], logits)
        outcome = plain.load_state_dict(found["adapters"], strict=False)
        assert not outcome.unexpected_keys
        close(logits_of(plain, tokens()).detach(), logits)
        base = MODELS["llama"](False, num_hidden_layers=2)
        layers = {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): weight
            for name, weight in found["merged"].items()
            if ".lora_" not in name
        }
        base.load_state_dict(layers)
        close(logits_of(base, tokens()).detach(), logits)
    train(reference, optimizer, range(2, 4))
    expected = {name: whole(p) for name, p in reference.named_parameters() if p.requires_grad}
    for world, sizes in ((2, {}), (4, TP)):
        for resumed in run_on_ranks(world, second_half, tmp_path, sizes):
            assert resumed.keys() == expected.keys()
            for name, value in resumed.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
