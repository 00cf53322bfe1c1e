"""Weights from files: this rank's blocks only, renamed and fused layouts, errors by name (B37)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import state_toys as toys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core.checkpoint_reading import SafetensorsReader
from shardwalk.parallelizer_core.dcp_source import quiet_alone
from shardwalk.parallelizer_core.materialize import materialize
from shardwalk.parallelizer_core.state_dict_adapter import (
    Index,
    ReadSlice,
    RenamingAdapter,
    read_concatenated,
)
from shardwalk.parallelizer_core.state_mismatch import StateMismatchError
from shardwalk.parallelizer_core.testing import run_on_ranks

FORMATS = ["file", "single", "sharded", "unindexed", "dcp"]


def on_meta(**kwargs: Any) -> toys.ToyLM:
    with torch.device("meta"):
        return toys.ToyLM(**kwargs)


def write(state: Mapping[str, Tensor], folder: Path, form: str) -> Path:
    """The checkpoint to load from."""
    tensors = {name: tensor.detach().clone() for name, tensor in state.items()}
    names = sorted(tensors)
    if form == "dcp":
        with quiet_alone():
            dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)
    elif form in {"file", "single"}:
        save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors" if form == "file" else folder
    else:
        halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in halves.items():
            save_file({name: tensors[name] for name in part}, folder / file)
        weight_map = {name: file for file, part in halves.items() for name in part}
        if form == "sharded":
            index = folder / "model.safetensors.index.json"
            index.write_text(json.dumps({"weight_map": weight_map}))
            (folder / "other.safetensors").write_bytes(b"not read")
    return folder


def loaded(sharding: str, path: Path, **options: Any) -> dict[str, Tensor]:
    model: nn.Module = on_meta()
    model = model if sharding == "ddp" else toys.SHARDINGS[sharding](model, **options)
    materialize(model, checkpoint=path)
    model = toys.ddp(model) if sharding == "ddp" else model  # type: ignore[arg-type]
    return {toys.bare_name(n): toys.whole(t) for n, t in model.state_dict().items()}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("sharding", "world"), [("fsdp", 2), ("ddp", 2), ("fsdp_tp", 4)])
def test_every_format_on_every_mesh(sharding: str, world: int, form: str, tmp_path: Path) -> None:
    expected = toys.toy(seed=3).state_dict()
    path = write(expected, tmp_path, form)
    for state in run_on_ranks(world, loaded, sharding, path):
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name


def bytes_read(sharding: str, path: Path) -> tuple[int, int]:
    model = toys.SHARDINGS[sharding](on_meta())
    reader = SafetensorsReader(path)
    with toys.Reductions() as reductions:
        materialize(model, checkpoint=reader)
    assert reductions.count == 0
    held = sum(
        (t.to_local() if isinstance(t, DTensor) else t).nbytes for t in model.state_dict().values()
    )
    return reader.bytes_read, held


@pytest.mark.parametrize(("sharding", "world"), [("fsdp", 4), ("hsdp", 4), ("fsdp_tp", 4)])
def test_each_rank_reads_only_what_it_holds(sharding: str, world: int, tmp_path: Path) -> None:
    path = write(toys.toy().state_dict(), tmp_path, "sharded")
    whole = sum(tensor.nbytes for tensor in toys.toy().state_dict().values())
    results = run_on_ranks(world, bytes_read, sharding, path)
    assert all(read == held for read, held in results)
    copies = 2 if sharding == "hsdp" else 1
    if sharding != "fsdp_tp":
        assert sum(read for read, _ in results) == copies * whole


class Mixed(nn.Module):
    """A bf16 layer with an fp32 router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3, bias=False, dtype=torch.float32)
        self.linear = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("form", ["single", "dcp"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_dtypes_stay_those_of_the_model(stored: torch.dtype, form: str, tmp_path: Path) -> None:
    """B09, B37: values are cast to the declared dtype; an fp32 router stays bit-equal to fp32."""
    torch.manual_seed(0)
    state = {name: torch.randn(3, 4).to(stored) for name in ("router.weight", "linear.weight")}
    path = write(state, tmp_path, form)
    with torch.device("meta"):
        model = Mixed()
    materialize(model, checkpoint=path)
    assert model.router.weight.dtype == torch.float32
    assert model.linear.weight.dtype == torch.bfloat16
    assert torch.equal(model.router.weight, state["router.weight"].float())
    assert torch.equal(model.linear.weight, state["linear.weight"].to(torch.bfloat16))


def first_loss(path: Path, dtype: torch.dtype) -> tuple[float, list[str]]:
    model = toys.toy(seed=9).to(dtype)
    toys.fsdp(model)
    before = {name: toys.whole(p) for name, p in model.named_parameters()}
    materialize(model, checkpoint=path)
    same = [n for n, p in model.named_parameters() if torch.equal(toys.whole(p), before[n])]
    loss = toys.mean_loss(model, *toys.my_rows("fsdp", *toys.batch())).detach()
    dist.all_reduce(loss)
    return loss.item() / 2, same


@pytest.mark.parametrize(
    ("stored", "dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_the_first_loss_is_that_of_the_file(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    """B37: on a model with other real weights too, every value is really loaded."""
    source = toys.toy(seed=3)
    for index, parameter in enumerate(source.parameters()):
        parameter.data += 0.1 * (index + 1)
    source = source.to(stored)
    path = write(source.state_dict(), tmp_path, "single")
    expected = toys.mean_loss(source.to(dtype), *toys.batch()).item()
    for loss, unchanged in run_on_ranks(2, first_loss, path, dtype):
        assert loss == pytest.approx(expected, rel=1e-4 if dtype == torch.float32 else 1e-2)
        assert unchanged == []


class FusedBlock(nn.Module):
    """Holds gate and up in one matrix, under a name of its own."""

    state_dict_adapter: Any

    def __init__(self, adapter: Any) -> None:
        super().__init__()
        self.gate_up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(5, 6, bias=False)
        self.state_dict_adapter = adapter


class FusingAdapter(RenamingAdapter):
    """Files with gate (4 rows) and up (6 rows) apart, and down transposed."""

    keys, sizes = ("mlp.gate.weight", "mlp.up.weight"), (4, 6)

    def __init__(self) -> None:
        super().__init__(lambda name: f"mlp.{name}")

    def file_shapes(self, name: str, shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        if name == "gate_up.weight":
            return {key: (size, shape[1]) for key, size in zip(self.keys, self.sizes, strict=True)}
        return {f"mlp.{name}": tuple(reversed(shape))}

    def read(self, name: str, shape: Sequence[int], index: Index, read: ReadSlice) -> Tensor:
        if name == "gate_up.weight":
            return read_concatenated(self.keys, self.sizes, index, read)
        return read(f"mlp.{name}", tuple(reversed(index))).T


def load_fused(path: Path) -> tuple[dict[str, Tensor], int, int]:
    with torch.device("meta"):
        model = FusedBlock(FusingAdapter())
    toys.fully_shard(model, mesh=toys.mesh_of(dist.get_world_size(), names=("shard",)))
    reader = SafetensorsReader(path)
    materialize(model, checkpoint=reader)
    held = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
    return {n: toys.whole(p) for n, p in model.named_parameters()}, reader.bytes_read, held


@pytest.mark.parametrize("world", [2, 4])
def test_an_adapter_fuses_transposes_and_reads_only_its_rows(world: int, tmp_path: Path) -> None:
    """B37: a fused target built from split keys, 10 rows over 4 ranks."""
    torch.manual_seed(0)
    gate, up, down = torch.randn(4, 6), torch.randn(6, 6), torch.randn(5, 6)
    save_file(
        {"mlp.gate.weight": gate, "mlp.up.weight": up, "mlp.down.weight": down},
        tmp_path / "model.safetensors",
    )
    for state, read, held in run_on_ranks(world, load_fused, tmp_path):
        assert torch.equal(state["gate_up.weight"], torch.cat([gate, up]))
        assert torch.equal(state["down.weight"], down.T)
        assert read == held


def test_an_adapter_that_renames(tmp_path: Path) -> None:
    model = on_meta()
    model.state_dict_adapter = RenamingAdapter(lambda name: f"model.{name}")
    state = toys.toy(seed=3).state_dict()
    path = write({f"model.{name}": tensor for name, tensor in state.items()}, tmp_path, "single")
    materialize(model, checkpoint=path)
    assert torch.equal(model.head.weight, state["head.weight"])


def mismatch(path: Path) -> tuple[str, bool]:
    model = toys.fsdp(on_meta())
    try:
        materialize(model, checkpoint=path)
    except StateMismatchError as error:
        return str(error), all(p.is_meta for p in model.parameters())
    return "nothing", False


@pytest.mark.parametrize("form", ["single", "dcp"])
def test_one_error_lists_everything_on_every_rank(form: str, tmp_path: Path) -> None:
    """B37: a renamed key, a lost one, other shapes and dtypes, all at once, before any write."""
    state = dict(toys.toy().state_dict())
    state["blocks.0.mlp.weight"] = state.pop("blocks.0.up.weight")
    del state["head.weight"]
    state["norm.bias"] = torch.zeros(7)
    state["norm.weight"] = torch.zeros(6, dtype=torch.int32)
    (message, untouched), other = run_on_ranks(2, mismatch, write(state, tmp_path, form))
    assert other == (message, True)
    assert untouched
    for part in (
        "missing (2): blocks.0.up.weight, head.weight;",
        "unexpected (1): blocks.0.mlp.weight;",
        "norm.bias (model [6], source [7])",
        "norm.weight (model torch.float32, source torch.int32: never cast)",
    ):
        assert part in message


@pytest.mark.parametrize("form", ["single", "dcp"])
@pytest.mark.parametrize(
    "kept", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]]
)
def test_tied_names_stand_in_for_each_other(kept: list[str], form: str, tmp_path: Path) -> None:
    """B03: either key of a tied pair is enough, and both may be there."""
    state = toys.toy(seed=3, tied=True).state_dict()
    tied = state.pop("embed.weight")
    del state["head.weight"]
    path = write(state | dict.fromkeys(kept, tied), tmp_path, form)
    model = on_meta(tied=True)
    materialize(model, checkpoint=path)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, tied)


@pytest.mark.parametrize("form", ["single", "dcp"])
def test_an_untied_head_must_be_there(form: str, tmp_path: Path) -> None:
    state = toys.toy().state_dict()
    del state["head.weight"]
    with pytest.raises(StateMismatchError, match=r"missing \(1\): head.weight"):
        materialize(on_meta(), checkpoint=write(state, tmp_path, form))


@pytest.mark.parametrize("form", ["single", "dcp"])
def test_tied_names_with_different_values_are_an_error(form: str, tmp_path: Path) -> None:
    path = write(toys.toy().state_dict(), tmp_path, form)
    with pytest.raises(StateMismatchError, match="embed.weight and head.weight .one tied tensor"):
        materialize(on_meta(tied=True), checkpoint=path)


@pytest.mark.parametrize("form", ["single", "dcp"])
def test_ignored_names_stay_unread(form: str, tmp_path: Path) -> None:
    state = toys.toy().state_dict() | {"blocks.0.inv_freq": torch.ones(2)}
    path = write(state, tmp_path, form)
    model = on_meta()
    materialize(model, checkpoint=path, ignore=["*.inv_freq"])
    assert torch.equal(model.head.weight, state["head.weight"])
    with pytest.raises(ValueError, match="ignore='nothing' matches no name"):
        materialize(on_meta(), checkpoint=path, ignore=["*.inv_freq", "nothing"])
    with pytest.raises(TypeError, match="sequence of patterns"):
        materialize(on_meta(), checkpoint=path, ignore="x")


def offloaded(path: Path) -> bool:
    model = toys.fsdp(on_meta(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    materialize(model, checkpoint=path)
    toys.mean_loss(model, *toys.my_rows("fsdp", *toys.batch())).backward()
    return all(p.device.type == "cpu" for p in model.parameters())


def test_offloaded_parameters_stay_on_the_cpu(tmp_path: Path) -> None:
    assert (
        run_on_ranks(2, offloaded, write(toys.toy().state_dict(), tmp_path, "single")) == [True] * 2
    )


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        materialize(on_meta(), checkpoint=tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="neither safetensors files nor"):
        materialize(on_meta(), checkpoint=tmp_path)
    write(toys.toy().state_dict(), tmp_path, "sharded")
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names files that are not there: b.safetensors"):
        materialize(on_meta(), checkpoint=tmp_path)


def test_a_key_in_two_files_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="'x', which another file beside it holds too"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "has no weight_map"),
        ("[]", "has no weight_map"),
        ('{"weight_map"', "is not valid JSON"),
    ],
)
def test_a_damaged_index_is_named(content: str, message: str, tmp_path: Path) -> None:
    write(toys.toy().state_dict(), tmp_path, "sharded")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(ValueError, match=f"{index} {message}"):
        materialize(on_meta(), checkpoint=tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write(toys.toy().state_dict(), tmp_path, "single")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ValueError, match=f"{file} is not a whole safetensors file"):
        materialize(on_meta(), checkpoint=tmp_path)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.scalar = nn.Parameter(torch.tensor(1.0))


def test_persistent_buffers_and_scalars_are_loaded(tmp_path: Path) -> None:
    source = Buffered()
    source.norm(torch.randn(8, 3))
    source.scalar.data.fill_(4.0)
    with torch.device("meta"):
        model = Buffered()
    materialize(model, checkpoint=write(source.state_dict(), tmp_path, "single"))
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
