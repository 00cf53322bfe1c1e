"""Files of transformers and Beam: bit for bit, from and to any mesh, each rank reading its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beam_toys import T6, beam_config, oracle_pair, tiny_beam, token_ids
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwalk.mesh import DistributedSetup, MeshContext, ParallelismSizes
from shardwalk.model_beam import BeamConfig, BeamForCausalLM
from shardwalk.parallelizer_core import (
    StateMismatchError,
    load_checkpoint,
    materialize,
    model_state_dict,
    optimizer_state_dict,
    parallelize_model,
    save_checkpoint,
)
from shardwalk.parallelizer_core.checkpoint_reading import SafetensorsReader
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
THREE_LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": T6["layer_types"][:3],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def files_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal names, dtypes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def islands(state: Mapping[str, Tensor]) -> set[str]:
    """What is float32 in a bfloat16 model."""
    return {name for name in state if "mlp.gate." in name}


def by_hand(model: BeamForCausalLM) -> dict[str, Tensor]:
    """The files of a model, spelled out."""
    files = {}
    for name, tensor in model.state_dict().items():
        path, _, attribute = name.rpartition(".")
        if not path.endswith(".experts"):
            files[name] = tensor
            continue
        for expert, weights in enumerate(tensor):
            parts = weights.chunk(len(PROJECTIONS[attribute]))
            for projection, part in zip(PROJECTIONS[attribute], parts, strict=True):
                files[f"{path}.{expert}.{projection}.weight"] = part
    return files


# One process


@pytest.mark.parametrize("variant", ["dense", "tied", "attention_bias"])
def test_names_in_memory_are_those_of_transformers(variant) -> None:
    changes = {"dense": {"mlp_layer_types": ["dense"] * 6}, "tied": {"tie_word_embeddings": True}}
    oracle, ours = oracle_pair(**changes.get(variant, {"attention_bias": True}))
    assert_same(ours.state_dict(), oracle.state_dict())
    fresh = BeamForCausalLM(ours.config)
    fresh.load_state_dict(oracle.state_dict(), strict=True)
    oracle.load_state_dict(ours.state_dict(), strict=True)
    assert_same(fresh.state_dict(), ours.state_dict())


@pytest.mark.parametrize(
    ("dtype", "size", "changes"),
    [
        ("fp32", "5GB", {}),
        ("fp32", "200KB", {"tie_word_embeddings": True, "attention_bias": True}),
        ("bf16", "200KB", {}),
        ("bf16", "5GB", {"mlp_layer_types": ["dense"] * 6, "tie_word_embeddings": True}),
    ],
)
def test_files_come_back_bit_for_bit(dtype, size, changes, tmp_path: Path) -> None:
    """From transformers to ours and back, in one file and in several, and with equal logits."""
    oracle, expected = oracle_pair(dtype=DTYPES[dtype], **changes)
    oracle.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert (tmp_path / "theirs" / "model.safetensors").exists() == (size == "5GB")
    ours = BeamForCausalLM.from_pretrained(tmp_path / "theirs")
    assert_same(ours.state_dict(), expected.state_dict())
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is (
        "tie_word_embeddings" in changes
    )
    ours.save_pretrained(tmp_path / "ours", max_file_size=size)
    assert (tmp_path / "ours" / "model.safetensors").exists() == (size == "5GB")
    assert_same(files_of(tmp_path / "ours"), files_of(tmp_path / "theirs"))
    named = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert named["architectures"] == ["BeamForCausalLM"]
    assert named["dtype"] == str(DTYPES[dtype]).removeprefix("torch.")

    again = type(oracle).from_pretrained(tmp_path / "ours")
    assert_same(again.state_dict(), oracle.state_dict())
    if dtype == "fp32":
        ids = token_ids(2, 24)
        with torch.no_grad():
            assert torch.equal(again(ids).logits, oracle.eval()(ids).logits)
            torch.testing.assert_close(ours(ids).logits, oracle(ids).logits, atol=5e-6, rtol=1e-5)


def test_the_router_is_float32_on_disk_whatever_the_rest_is(tmp_path: Path) -> None:
    source = tiny_beam()
    source.save_pretrained(tmp_path / "wide")
    narrow = BeamForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.bfloat16)
    kept = islands(source.state_dict())
    assert len(kept) == 2 * 5
    for name, tensor in narrow.state_dict().items():
        wanted = source.state_dict()[name]
        assert_same({name: tensor}, {name: wanted if name in kept else wanted.bfloat16()})
    narrow.save_pretrained(tmp_path / "narrow")
    source.save_pretrained(tmp_path / "cast", dtype=torch.bfloat16)
    files = files_of(tmp_path / "narrow")
    assert {key for key, tensor in files.items() if tensor.dtype == torch.float32} == kept
    assert_same(files, by_hand(narrow))
    assert_same(files_of(tmp_path / "cast"), files)
    assert BeamForCausalLM.from_pretrained(tmp_path / "cast").lm_head.weight.dtype == torch.bfloat16
    assert source.config == beam_config()


def test_keys_that_do_not_fit_are_named(tmp_path: Path) -> None:
    files = by_hand(tiny_beam(dtype=torch.bfloat16))
    beam_config().save_pretrained(tmp_path)
    experts = "model.layers.1.mlp.experts"
    del files[f"{experts}.7.up_proj.weight"], files["model.layers.2.self_attn.gate_bias"]
    files[f"{experts}.8.up_proj.weight"] = torch.zeros(32, 64)
    files[f"{experts}.3.down_proj.weight"] = torch.zeros(64, 31)
    save_file(
        {k: t.detach().contiguous() for k, t in files.items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(StateMismatchError) as error:
        BeamForCausalLM.from_pretrained(tmp_path)
    missing, unexpected = str(error.value).split("unexpected", 1)
    assert f"{experts}.7.up_proj.weight" in missing
    assert "model.layers.2.self_attn.gate_bias" in missing
    assert f"{experts}.8.up_proj.weight" in unexpected
    assert f"{experts}.3.down_proj.weight" in unexpected


def test_dtypes_that_nobody_can_train_are_refused(tmp_path: Path) -> None:
    config = beam_config()
    with pytest.raises(TypeError, match="dtype='bfloat16' must be a torch.dtype"):
        BeamForCausalLM.on_meta(config, dtype="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype=torch.int8 must be one of"):
        BeamForCausalLM.on_meta(config, dtype=torch.int8)
    with pytest.raises(ValueError, match="dtype='int8' in the config must be one of"):
        BeamForCausalLM.on_meta(BeamConfig.from_dict({**T6, "dtype": "int8"}))
    with pytest.raises(FileNotFoundError):
        BeamForCausalLM.from_pretrained(tmp_path)


# Any mesh


def context(**sizes: int) -> MeshContext:
    """Of these sizes over all ranks, made once per process."""

    def make() -> MeshContext:
        return DistributedSetup.build(
            "fsdp2",
            parallelism_sizes=ParallelismSizes(**sizes),
            moe_parallel_config={} if "ep_size" in sizes else None,
        ).mesh_context

    return cached(("beam_state_dict", *sizes.items()), make)


class Recording(SafetensorsReader):
    """Knows which keys it read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.keys: set[str] = set()

    def read(self, key: str, index: tuple[slice, ...]) -> Tensor:
        self.keys.add(key)
        return super().read(key, index)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def through_a_mesh(source: Path, folder: Path, sizes: dict[str, int]) -> None:
    """Read the files onto a mesh, each rank its own, and write them again."""
    model = BeamForCausalLM.on_meta(source)
    parallelize_model(model, context(**sizes))
    reader = Recording(source)
    materialize(model, checkpoint=reader)
    held = [local(tensor) for tensor in model.state_dict().values()]
    assert reader.bytes_read == sum(tensor.numel() * tensor.element_size() for tensor in held)
    read = {int(key.split(".")[5]) for key in reader.keys if ".experts." in key}
    if "ep_size" in sizes:
        count = 8 // sizes["ep_size"]
        first = dist.get_rank() % sizes["ep_size"] * count
        assert read == set(range(first, first + count))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that transformers wrote."""
    folders = {name: tmp_path_factory.mktemp(name) for name in DTYPES}
    for name, folder in folders.items():
        oracle, _ = oracle_pair(dtype=DTYPES[name], **THREE_LAYERS)
        oracle.save_pretrained(folder, max_shard_size="200KB")
    return folders


@pytest.mark.parametrize(
    ("dtype", "world", "sizes"),
    [
        ("bf16", 2, {}),
        ("fp32", 2, {"ep_size": 1}),
        ("bf16", 2, {"ep_size": 2}),
        ("bf16", 4, {"ep_size": 2}),
        ("fp32", 4, {"ep_size": 4}),
        ("bf16", 2, {"tp_size": 2}),
        ("fp32", 4, {"tp_size": 2, "ep_size": 2}),
    ],
    ids=str,
)
def test_files_come_back_bit_for_bit_from_a_mesh(
    dtype, world, sizes, sources: dict[str, Path], tmp_path: Path
) -> None:
    run_on_ranks(world, through_a_mesh, sources[dtype], tmp_path, sizes)
    assert_same(files_of(tmp_path), files_of(sources[dtype]))


# Checkpoints of training


def whole_state(model: BeamForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = {f"model {n}": t for n, t in model_state_dict(model, full=True).items()}
    for name, moments in optimizer_state_dict(model, optimizer, full=True)["state"].items():
        state |= {f"{key} {name}": value for key, value in moments.items()}
    return state


def start(seed: int, sizes: dict[str, int] | None) -> tuple[BeamForCausalLM, torch.optim.Optimizer]:
    model = tiny_beam(seed, **THREE_LAYERS)
    if sizes is not None:
        parallelize_model(model, context(**sizes))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(sizes: dict[str, int], folder: Path) -> dict[str, Any]:
    """Two steps, saved."""
    model, optimizer = start(0, sizes)
    for step in range(2):
        ids = token_ids(2, 16, seed=4 * step + dist.get_rank())
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, model, optimizer, step=2)
    return whole_state(model, optimizer)


def loaded(sizes: dict[str, int] | None, folder: Path) -> dict[str, Any]:
    model, optimizer = start(1, sizes)
    load_checkpoint(folder, model, optimizer)
    return whole_state(model, optimizer)


def test_a_run_continues_on_another_mesh(tmp_path: Path) -> None:
    """Experts over two ranks, each sharded over two more; then tensors over two; then no mesh."""
    expected = run_on_ranks(4, trained, {"ep_size": 2}, tmp_path)[0]
    assert any(name.startswith("exp_avg_sq") and "experts" in name for name in expected)
    for state in run_on_ranks(2, loaded, {"tp_size": 2}, tmp_path):
        assert_same(state, expected)
    assert_same(loaded(None, tmp_path), expected)
