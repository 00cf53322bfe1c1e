"""Exports that transformers loads: the logits of the model that was exported, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM

from shardwalk.parallelizer_core import export_safetensors, materialize
from shardwalk.parallelizer_core.state_dicts import model_state_dict
from shardwalk.parallelizer_core.testing import cached, run_on_ranks
from tests.matrix.case_models import mean_loss, mine, on_meta, parallel, seeded, tokens
from tests.matrix.tiny_transformers import MODELS

ties = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
models = pytest.mark.parametrize("name", list(MODELS))


def trained(model: nn.Module, kind: str) -> nn.Module:
    """Parallelized, and two steps away from what a seed could give again."""
    model = parallel(model, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        mean_loss(model, mine(tokens())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def exported(
    name: str, tied: bool, kind: str, folder: Path, options: dict[str, Any]
) -> dict[str, Tensor]:
    model = trained(seeded(MODELS[name], tied=tied), kind)
    export_safetensors(model, folder, **options)
    return model_state_dict(model, full=True)


def one_process(name: str, tied: bool, state: dict[str, Tensor]) -> nn.Module:
    """The source model: constructed as the original and given its weights by torch alone."""
    model = MODELS[name](tied)
    model.load_state_dict(state, strict=True)
    return model.eval()


def loaded(folder: Path) -> Any:
    """What transformers reads, with nothing missing, unexpected or of another shape."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("ddp", 2)])
@ties
@models
def test_transformers_loads_what_was_exported(
    name: str, tied: bool, kind: str, world: int, tmp_path: Path
) -> None:
    size = "20KB" if world == 4 else "5GB"
    options = {"max_file_size": size}
    states = run_on_ranks(world, exported, name, tied, kind, tmp_path, options)
    source = one_process(name, tied, states[0])
    model = loaded(tmp_path)
    assert type(model) is type(source)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.dtype == torch.float32
    for key, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, source(tokens()).logits)
    assert (tmp_path / "model.safetensors.index.json").exists() == (world == 4)


def in_bf16(name: str, folder: Path) -> dict[str, Tensor]:
    """The config says fp16, as that of a model loaded from such files would."""
    model = seeded(MODELS[name], tied=True)
    model.config.dtype = torch.float16
    model = parallel(model)
    export_safetensors(model, folder, dtype=torch.bfloat16)
    assert model.config.dtype == torch.float16
    return model_state_dict(model, full=True)


@models
def test_transformers_loads_a_cast_export_in_its_dtype(name: str, tmp_path: Path) -> None:
    state = run_on_ranks(2, in_bf16, name, tmp_path)[0]
    source = one_process(name, True, state).to(torch.bfloat16)
    model = loaded(tmp_path)
    assert model.dtype == torch.bfloat16
    for key, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(source).__name__]


def split_over_two_axes(name: str, folder: Path) -> dict[str, Tensor]:
    """Projections split over tp by hand and FSDP2 over them: strided 2-D shards."""
    torch.manual_seed(3)
    model: Any = MODELS[name](False)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    mesh = cached("export 2x2", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("d", "t")))
    for layer in model.model.layers:
        plan = {f"self_attn.{part}_proj": ColwiseParallel() for part in "qkv"}
        plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh["t"], plan)
        fully_shard(layer, mesh=mesh["d"])
    parallelize_module(model.lm_head, mesh["t"], ColwiseParallel())
    fully_shard(model, mesh=mesh["d"])
    export_safetensors(model, folder, max_file_size="30KB")
    return state


@models
def test_shards_over_two_axes(name: str, tmp_path: Path) -> None:
    state = run_on_ranks(4, split_over_two_axes, name, tmp_path)[0]
    source, model = one_process(name, False, state), loaded(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, source(tokens()).logits)


def round_trip(name: str, tied: bool, folder: Path) -> bool:
    model = trained(seeded(MODELS[name], tied=tied), "hsdp")
    export_safetensors(model, folder, max_file_size="20KB")
    other = parallel(on_meta(MODELS[name], tied=tied), "fsdp")
    materialize(other, checkpoint=folder)
    expected, found = model_state_dict(model, full=True), model_state_dict(other, full=True)
    dist.barrier()
    return all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@ties
@models
def test_materialize_loads_what_was_exported(name: str, tied: bool, tmp_path: Path) -> None:
    assert run_on_ranks(4, round_trip, name, tied, tmp_path) == [True] * 4
