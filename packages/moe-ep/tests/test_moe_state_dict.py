"""Experts on disk: a tensor per expert in files, and checkpoints that change the ep size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_layer_toys import MoEDecoder
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardwalk.moe_ep.experts import GroupedExperts
from shardwalk.moe_ep.state_dict import PerExpertAdapter
from shardwalk.parallelizer_core import (
    StateMismatchError,
    export_safetensors,
    load_checkpoint,
    materialize,
    model_state_dict,
    optimizer_state_dict,
    save_checkpoint,
)
from shardwalk.parallelizer_core.model_tensors import local_index, write_full
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import distribute_parameter
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

OPTIONS = {"num_shared_experts": 1, "correction_bias": True, "expert_bias": True}
ADAPTERS = {
    "gate, up and down": {},
    "w1, w3 and w2": {
        "gate": "w1",
        "up": "w3",
        "down": "w2",
        "rename": lambda key: "model." + key.replace(".mlp.experts", ".block_sparse_moe.experts"),
    },
}


def build(
    activation: str = "swiglu", seed: int | None = 0, adapter: str | None = None
) -> nn.Module:
    """A seeded decoder, or one on meta."""
    if seed is None:
        with torch.device("meta"):
            model = MoEDecoder(activation=activation, **OPTIONS)
    else:
        torch.manual_seed(seed)
        model = MoEDecoder(activation=activation, **OPTIONS)
        for block in model.layers:
            nn.init.normal_(block.mlp.gate.e_score_correction_bias)
    if adapter is not None:
        model.state_dict_adapter = PerExpertAdapter(**ADAPTERS[adapter])
    return model


def by_hand(model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """The files of a model, spelled out."""
    options = ADAPTERS[adapter]
    gate, up, down = (options.get(n, f"{n}_proj") for n in ("gate", "up", "down"))
    files = {}
    for name, tensor in model.state_dict().items():
        path, _, attribute = name.rpartition(".")
        if not path.endswith(".experts"):
            files[name] = tensor
            continue
        kind = "bias" if attribute.endswith("_bias") else "weight"
        for expert in range(4):
            mine = tensor[expert]
            if attribute.startswith("gate_up"):
                files[f"{path}.{expert}.{gate}.{kind}"] = mine[:12]
                files[f"{path}.{expert}.{up}.{kind}"] = mine[12:]
            else:
                projection = up if attribute.startswith("up") else down
                files[f"{path}.{expert}.{projection}.{kind}"] = mine
    rename = options.get("rename", str)
    return {rename(name): tensor.detach().clone() for name, tensor in files.items()}


def write(files: Mapping[str, Tensor], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(files), folder / "model.safetensors")
    return folder


def assert_same_state(model: nn.Module, expected: nn.Module) -> None:
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_files_and_model_become_each_other(adapter, activation, tmp_path: Path) -> None:
    source = build(activation, adapter=adapter)
    files = by_hand(source, adapter)
    model = build(activation, seed=None, adapter=adapter)
    materialize(model, checkpoint=write(files, tmp_path / "files"))
    assert_same_state(model, source)
    export_safetensors(model, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == files.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in files.items())


def test_the_names_of_an_adapter_must_differ() -> None:
    with pytest.raises(ValueError, match="must be three names"):
        PerExpertAdapter(gate="w1", up="w1")


def test_files_of_mixed_dtypes_lose_nothing(tmp_path: Path) -> None:
    source = build(adapter="gate, up and down")
    files = by_hand(source, "gate, up and down")
    key = "layers.0.mlp.experts.0.down_proj.weight"
    files[key] = files[key].bfloat16()
    model = build(seed=None, adapter="gate, up and down")
    materialize(model, checkpoint=write(files, tmp_path))
    theirs, ours = source.layers[0].mlp.experts.down_proj, model.layers[0].mlp.experts.down_proj
    assert torch.equal(ours[1:], theirs[1:])
    assert torch.equal(ours[0], theirs[0].bfloat16().float())


# A rank's own experts


def mesh_of(ep_size: int, world: int) -> Any:
    return cached(
        ("ep mesh", ep_size),
        lambda: init_device_mesh("cpu", (world // ep_size, ep_size), mesh_dim_names=("s", "ep")),
    )


def spread(model: nn.Module, ep_size: int, world: int) -> nn.Module:
    """Experts over ep, and over the rest of the ranks on dim 1; all else over all ranks."""
    if world == 1:
        return model
    mesh = mesh_of(ep_size, world)
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            for name, _ in list(module.named_parameters()):
                distribute_parameter(module, name, mesh["ep"], Shard(0))
            fully_shard(module, mesh=mesh["s"], shard_placement_fn=lambda _: Shard(1))
    fully_shard(model)
    return model


class CountingReader:
    """Files in memory, and the blocks that were read of them."""

    def __init__(self, files: Mapping[str, Tensor]) -> None:
        self._files = files
        self.read_of: dict[str, list[tuple[slice, ...]]] = {}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._files

    def read(self, key: str, index: tuple[slice, ...]) -> Tensor:
        self.read_of.setdefault(key, []).append(index)
        return self._files[key][index].clone()


def read_own(ep_size: int, world: int) -> None:
    source = build(adapter="gate, up and down")
    reader = CountingReader(by_hand(source, "gate, up and down"))
    model = spread(build(seed=None, adapter="gate, up and down"), ep_size, world)
    materialize(model, checkpoint=reader)
    for name, tensor in model.state_dict().items():
        whole = source.state_dict()[name]
        part = whole[local_index(tensor)] if isinstance(tensor, DTensor) else whole
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(local, part), name
    own = local_index(model.layers[0].mlp.experts.down_proj)[0]
    read = {int(key.split(".")[4]) for key in reader.read_of if ".experts." in key}
    assert read == set(range(own.start, own.stop))
    elements = sum(
        reader.tensors[key][index].numel()
        for key, blocks in reader.read_of.items()
        for index in blocks
        if ".experts." in key
    )
    held = sum(p.to_local().numel() for n, p in model.named_parameters() if ".experts." in n)
    assert (
        elements
        == held
        == sum(p.numel() for n, p in source.named_parameters() if ".experts." in n) // world
    )


@pytest.mark.parametrize(("ep_size", "world"), [(2, 2), (1, 2), (4, 4), (2, 4)])
def test_a_rank_reads_its_own_experts_and_rows(ep_size: int, world: int) -> None:
    run_on_ranks(world, read_own, ep_size, world)


def export(ep_size: int, world: int, folder: Path) -> None:
    export_safetensors(spread(build(adapter="w1, w3 and w2"), ep_size, world), folder)


@pytest.mark.parametrize(("ep_size", "world"), [(2, 2), (2, 4)])
def test_an_export_from_any_mesh_has_a_tensor_per_expert(
    ep_size: int, world: int, tmp_path: Path
) -> None:
    run_on_ranks(world, export, ep_size, world, tmp_path)
    files = by_hand(build(), "w1, w3 and w2")
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == files.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in files.items())


def mismatch(files: dict[str, Tensor], ep_size: int, world: int) -> str:
    model = spread(build(seed=None, adapter="gate, up and down"), ep_size, world)
    try:
        materialize(model, checkpoint=CountingReader(files))
    except StateMismatchError as error:
        return str(error)
    return ""


def test_missing_and_extra_experts_are_named_on_every_rank() -> None:
    """Also by ranks that hold neither of them."""
    files = by_hand(build(), "gate, up and down")
    del files["layers.1.mlp.experts.3.up_proj.weight"]
    files["layers.0.mlp.experts.4.down_proj.weight"] = torch.zeros(8, 12)
    files["layers.0.mlp.experts.1.gate_proj.weight"] = torch.zeros(11, 8)
    for message in run_on_ranks(2, mismatch, files, 2, 2):
        missing, rest = message.split("unexpected", 1)
        assert "layers.1.mlp.experts.3.up_proj.weight" in missing
        assert "layers.0.mlp.experts.4.down_proj.weight" in rest
        assert "layers.0.mlp.experts.1.gate_proj.weight" in rest


# Checkpoints of training


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step with gradients that depend on nothing but names and the step."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(hash_of(name, number))
        parameter.grad = torch.zeros_like(parameter)
        write_full(parameter.grad, torch.randn(parameter.shape, generator=generator))
    optimizer.step()


def hash_of(name: str, number: int) -> int:
    return number + sum(ord(letter) * place for place, letter in enumerate(name, start=1))


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    moments = optimizer_state_dict(model, optimizer, full=True)["state"]
    return {"model": model_state_dict(model, full=True), "moments": moments}


def start(ep_size: int, world: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = spread(build(seed=seed), ep_size, world)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_and_save(ep_size: int, world: int, folder: Path) -> None:
    model, optimizer = start(ep_size, world, seed=0)
    for number in (1, 2):
        step(model, optimizer, number)
    save_checkpoint(folder, model, optimizer, step=2)


def continued(ep_size: int, world: int, folder: Path | None) -> list[dict[str, Any]]:
    """The state after two steps, of which the folder holds a part, and after the third."""
    model, optimizer = start(ep_size, world, seed=0 if folder is None else 1)
    if folder is None:
        for number in (1, 2):
            step(model, optimizer, number)
    else:
        step(model, optimizer, 7)
        load_checkpoint(folder, model, optimizer)
    loaded = whole_state(model, optimizer)
    step(model, optimizer, 3)
    return [loaded, whole_state(model, optimizer)]


@pytest.mark.parametrize(("ep_size", "world"), [(1, 1), (1, 2), (2, 2), (4, 4), (2, 4)], ids=str)
def test_a_run_continues_on_any_ep_size(ep_size: int, world: int, tmp_path: Path) -> None:
    """B29: a checkpoint holds all experts, not those of one rank under the names of all."""
    run_on_ranks(2, train_and_save, 2, 2, tmp_path)
    expected = continued(1, 1, None)
    for states in run_on_ranks(world, continued, ep_size, world, tmp_path):
        for state, wanted in zip(states, expected, strict=True):
            assert state["model"].keys() == wanted["model"].keys()
            assert state["moments"].keys() == wanted["moments"].keys()
            for name, tensor in wanted["model"].items():
                assert torch.equal(state["model"][name], tensor), name
            for name, moments in wanted["moments"].items():
                for key, value in moments.items():
                    assert torch.equal(state["moments"][name][key], value), (name, key)


# A published layout


def test_the_files_of_qwen3_moe(tmp_path: Path) -> None:
    """Stacked in the model, one tensor per expert in the files that transformers writes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=13, hidden_size=8, intermediate_size=12, moe_intermediate_size=12,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    source = transformers.Qwen3MoeForCausalLM(config)
    source.save_pretrained(tmp_path / "theirs")
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    model.state_dict_adapter = PerExpertAdapter()
    materialize(model, checkpoint=tmp_path / "theirs")
    assert_same_state(model, source)
    export_safetensors(model, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / n / "model.safetensors") for n in ("theirs", "ours"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    again = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "ours")
    assert_same_state(again, source)
