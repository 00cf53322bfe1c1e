"""Materialize, accumulate, clip, save and load after `parallelize_model`, on every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import state_toys as toys
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwalk.mesh import DistributedSetup, FSDP2Config, MeshContext, ParallelismSizes
from shardwalk.parallelizer_core.checkpoint import load_checkpoint, save_checkpoint
from shardwalk.parallelizer_core.gradients import (
    TokenNormalizer,
    clip_grad_norm_,
    sync_gradients_on_last,
)
from shardwalk.parallelizer_core.materialize import materialize
from shardwalk.parallelizer_core.model_parallelizer import parallelize_model
from shardwalk.parallelizer_core.state_dicts import model_state_dict
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

PLAIN = {"fsdp": {}, "hsdp": {"dp_replicate_size": 2}, "ddp": {}}


def context(strategy: str) -> MeshContext:
    def make() -> MeshContext:
        sizes = ParallelismSizes(**PLAIN[strategy])
        config: Any = FSDP2Config(mp_policy=MixedPrecisionPolicy())
        config = "ddp" if strategy == "ddp" else config
        return DistributedSetup.build(strategy=config, parallelism_sizes=sizes).mesh_context

    return cached(("after_parallelize", strategy), make)


def meta_toy() -> toys.ToyLM:
    with torch.device("meta"):
        return toys.ToyLM(tied=True)


def started(strategy: str, path: Path | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """From meta to a model and its optimizer; DDP wraps real weights."""
    model: nn.Module = meta_toy()
    if strategy == "ddp":
        materialize(model, checkpoint=path)
    model = parallelize_model(model, context(strategy))
    if strategy != "ddp":
        materialize(model, checkpoint=path)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def train(strategy: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Two micro-batches with a clip in between; the norm before clipping."""
    x, y = toys.my_rows("fsdp", *toys.batch())
    batches = list(zip(x.chunk(2), y.chunk(2), strict=True))
    normalizer = TokenNormalizer(context(strategy), [y.numel() for _, y in batches])
    for inputs, labels in sync_gradients_on_last(model, batches):
        normalizer(toys.token_losses(model, inputs, labels)).backward()
    norm = clip_grad_norm_(model, 0.05).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def run(strategy: str, path: Path, folder: Path) -> tuple[list[float], dict[str, Tensor], float]:
    model, optimizer = started(strategy, path)
    norms = [train(strategy, model, optimizer) for _ in range(2)]
    save_checkpoint(folder, model, optimizer, step=2)
    state = model_state_dict(model, full=True)
    norms.append(train(strategy, model, optimizer))
    resumed, fresh = started(strategy, path)
    load_checkpoint(folder, resumed, fresh)
    dist.barrier()
    return norms, state, train(strategy, resumed, fresh)


@pytest.mark.parametrize(("strategy", "world"), [("fsdp", 2), ("hsdp", 4), ("ddp", 2)])
def test_a_run_equals_that_of_one_process(strategy: str, world: int, tmp_path: Path) -> None:
    source = toys.toy(seed=3, tied=True)
    state = {k: v.clone() for k, v in source.state_dict().items() if k != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-2, eps=1e-4)
    expected = []
    for _ in range(3):
        after_two = model_state_dict(source, full=True)
        toys.token_losses(source, *toys.batch()).mean().backward()
        expected.append(clip_grad_norm_(source, 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path / "saved"
    for norms, found, resumed in run_on_ranks(world, run, strategy, tmp_path, folder):
        assert norms == pytest.approx(expected, rel=1e-5)
        assert resumed == norms[2]
        assert list(found) == list(after_two)
        for name, tensor in after_two.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
