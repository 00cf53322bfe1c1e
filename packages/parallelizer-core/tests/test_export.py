"""Exports: the state dict of one process in safetensors files, written by one rank of any mesh."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import state_toys as toys
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_materialize_checkpoint import FusedBlock, FusingAdapter
from test_state_dicts import Counting, wrapped
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwalk.mesh import FSDP2Config, MeshContext
from shardwalk.parallelizer_core import (
    RenamingAdapter,
    export,
    export_safetensors,
    gathering,
    materialize,
    safetensors_writing,
)
from shardwalk.parallelizer_core.parallel_state import record_mesh_context
from shardwalk.parallelizer_core.safetensors_writing import SafetensorsWriter
from shardwalk.parallelizer_core.testing import run_on_ranks

INDEX = "model.safetensors.index.json"
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, read by the safetensors library as the index says."""
    if not (folder / INDEX).exists():
        assert [file.name for file in folder.glob("model*")] == ["model.safetensors"]
        return load_file(folder / "model.safetensors")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert set(files) == {file.name for file in folder.glob("model-*")}
    found = {key: tensor for part in files.values() for key, tensor in part.items()}
    assert {key: name for name, part in files.items() for key in part} == weight_map
    return found


def equal(found: Tensor, expected: Tensor) -> bool:
    """Whether shape, dtype and every bit agree."""
    same = found.dtype == expected.dtype and found.shape == expected.shape
    return same and bits(found) == bits(expected)


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


def assert_holds(folder: Path, expected: Mapping[str, Tensor]) -> None:
    found = read(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert equal(found[name], tensor), name


# The format


@pytest.mark.parametrize("staging", [1, 7, 8, 1 << 20])
def test_the_library_reads_what_is_appended_tensor_by_tensor(
    staging: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every dtype, scalars, empty tensors, any strides, names beyond ASCII, pieces of any size."""
    monkeypatch.setattr(safetensors_writing, "STAGING_BYTES", max(staging, 8))
    torch.manual_seed(0)
    tensors = {f"d.{dtype}": torch.randint(2, (3, 5)).to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "größe.\"'": torch.randn(4),
        "transposed": torch.randn(5, 6, 7).permute(2, 0, 1),
        "one row": torch.randn(9, 1).T,
        "strided": torch.randn(20)[::3],
        "expanded": torch.randn(3).expand(4, 3),
    }
    writer = SafetensorsWriter(tmp_path / "x", {k: t.shape for k, t in tensors.items()})
    for key, tensor in tensors.items():
        writer.add(key, tensor, tensor.dtype)
    writer.finish()
    size = int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")
    assert size % 8 == 0
    found = load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert equal(found[key], tensor), key
    with safe_open(tmp_path / "x", "pt") as handle:
        assert handle.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", ["x" * length for length in range(1, 9)])
def test_the_data_starts_at_a_multiple_of_eight_bytes(name: str, tmp_path: Path) -> None:
    export_safetensors(nn.ModuleDict({name: nn.Linear(1, 1)}), tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0
    assert f"{name}.weight" in read(tmp_path)


def test_every_tensor_lies_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    model = nn.ParameterDict({
        f"p{index}": nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
        for index, dtype in enumerate(reversed(DTYPES))
    })
    export_safetensors(model, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for key, tensor in model.state_dict().items():
        assert header[key]["data_offsets"][0] % tensor.element_size() == 0
    assert_holds(tmp_path, model.state_dict())


# Values and names


def exported(sharding: str, folder: Path, options: dict[str, Any]) -> list[str]:
    model = toys.toy(seed=3, tied=options.pop("tied", False))
    model.norm.requires_grad_(False)
    model = wrapped(model) if options.pop("wrap", False) else model
    sharded = toys.SHARDINGS[sharding](model)
    with toys.nan_in_new_memory():
        export_safetensors(sharded, folder, **options)
    assert all(parameter.grad is None for parameter in sharded.parameters())
    dist.barrier()
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("size", ["5GB", 500])
@pytest.mark.parametrize(
    ("sharding", "world"),
    [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("tp", 2), ("fsdp_tp", 4), ("ddp", 2), ("single", 2)],
)
def test_every_mesh_gives_the_state_dict_of_one_process(
    sharding: str, world: int, size: int | str, tmp_path: Path
) -> None:
    """Uneven shards, strided ones and replicated ones; frozen parameters are there too."""
    options = {"max_file_size": size}
    names = run_on_ranks(world, exported, sharding, tmp_path / "deep" / "er", options)
    assert names == [names[0]] * world
    assert len(names[0]) > 3 if size == 500 else names[0] == ["model.safetensors"]
    assert_holds(tmp_path / "deep" / "er", toys.toy(seed=3).state_dict())


@pytest.mark.parametrize(("sharding", "world"), [("fsdp", 2), ("ddp", 2), ("hsdp", 4)])
def test_wrappers_leave_no_trace_and_ties_stand_once(
    sharding: str, world: int, tmp_path: Path
) -> None:
    """DDP, checkpointing and compile in the names; the tied head under the embedding's name."""
    run_on_ranks(world, exported, sharding, tmp_path, {"tied": True, "wrap": True})
    expected = toys.toy(seed=3, tied=True).state_dict()
    del expected["head.weight"]
    assert_holds(tmp_path, expected)


def test_without_a_process_group(tmp_path: Path) -> None:
    model = toys.toy()
    export_safetensors(model, str(tmp_path))
    assert_holds(tmp_path, model.state_dict())
    export_safetensors([model.blocks, model.norm], tmp_path / "parts")
    expected = model.blocks.state_dict() | model.norm.state_dict()
    assert_holds(tmp_path / "parts", expected)
    export_safetensors(nn.ReLU(), tmp_path / "none")
    assert_holds(tmp_path / "none", {})


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("ids", torch.arange(1 << 40, (1 << 40) + 5))
        self.register_buffer("table", torch.randn(2, 3))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.gate = nn.Linear(3, 2)
        self.gate.register_buffer("bias2", torch.randn(3))
        self.quantized = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
        self._keep_in_fp32_modules_strict = ["gate"]


def test_buffers_as_in_the_state_dict(tmp_path: Path) -> None:
    model = Buffers()
    export_safetensors(model, tmp_path)
    assert "passing" not in read(tmp_path)
    assert_holds(tmp_path, model.state_dict())


def cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What a cast export of `Buffers` holds: neither integers, fp8 nor what is pinned changes."""
    floats = (torch.float32, torch.float16, torch.bfloat16)
    return {
        name: t.to(dtype) if t.dtype in floats and not name.startswith("gate") else t
        for name, t in state.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_spares_integers_and_what_is_pinned(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Buffers()
    export_safetensors(model, tmp_path, dtype=dtype)
    assert_holds(tmp_path, cast(model.state_dict(), dtype))


def seeded_buffers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Buffers())


def sharded_cast(folder: Path) -> None:
    model = seeded_buffers()
    ignored = {model[0].scalar, model[0].quantized}
    toys.fully_shard(model, mesh=toys.mesh_of(2, names=("shard",)), ignored_params=ignored)  # type: ignore[call-overload]
    export_safetensors(torch.compile(model, backend="eager"), folder, dtype=torch.bfloat16)


def test_a_cast_of_shards(tmp_path: Path) -> None:
    run_on_ranks(2, sharded_cast, tmp_path)
    inner = cast(seeded_buffers()[0].state_dict(), torch.bfloat16)  # type: ignore[index]
    assert_holds(tmp_path, {f"0.{name}": tensor for name, tensor in inner.items()})


def test_pins_narrower_than_fp32_are_exported_as_they_are(tmp_path: Path) -> None:
    model = Buffers()
    model.gate.to(torch.float16)
    export_safetensors(model, tmp_path, dtype=torch.bfloat16)
    assert equal(read(tmp_path)["gate.weight"], model.gate.weight)


# Layouts of DTensors that no walk makes


def odd_layouts(folder: Path) -> dict[str, Tensor]:
    mesh = toys.mesh_of(2, 2, names=("a", "b"))
    full = torch.arange(77.0).view(7, 11)
    made = {
        "both": distribute_tensor(full, mesh, [Shard(0), Shard(1)]),
        "again": distribute_tensor(full, mesh, [Shard(1), Shard(1)]),
        "replicated": distribute_tensor(full, mesh, [Replicate(), Replicate()]),
        "columns": distribute_tensor(full, mesh, [Replicate(), Shard(1)]),
        "few rows": distribute_tensor(full[:1], mesh, [Shard(0), Shard(0)]),
        "empty": distribute_tensor(full[:0], mesh, [Shard(0), Replicate()]),
        "scalar": distribute_tensor(full[0, 3], mesh, [Replicate(), Replicate()]),
        "sum": DTensor.from_local(full / 4, mesh, [Partial(), Partial()]),
        "half sum": DTensor.from_local(full[:, :3] / 2, mesh, [Partial(), Shard(0)]),
    }
    model = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in made.items()})
    export_safetensors(model, folder, dtype=None)
    return {name: tensor.full_tensor() for name, tensor in made.items()}


def test_any_layout_of_dtensors(tmp_path: Path) -> None:
    """Two axes on one or two dimensions, replicas, ranks without rows, terms of a sum."""
    expected = run_on_ranks(4, odd_layouts, tmp_path)[0]
    assert_holds(tmp_path, expected)
    assert torch.equal(expected["sum"], torch.arange(77.0).view(7, 11))


def strided_shards(folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    mesh = toys.mesh_of(2, 2, names=("shard", "tp"))
    model = nn.ModuleList(nn.Linear(5, rows) for rows in (3, 5, 6, 7, 11))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for linear in model:
        toys.parallelize_module(linear, mesh["tp"], toys.ColwiseParallel())
        toys.fully_shard(linear, mesh=mesh["shard"])
    export_safetensors(model, folder)
    return expected


def test_uneven_shards_of_uneven_shards(tmp_path: Path) -> None:
    """Rows over two axes, none of which divides them, in the order in which FSDP2 shards."""
    assert_holds(tmp_path, run_on_ranks(4, strided_shards, tmp_path)[0])


def parts_of_a_pipeline(folder: Path) -> None:
    """Stage 0 on ranks 0 and 1 holds the first block, stage 1 on the others the rest."""
    model = toys.toy(seed=3)
    stages = toys.mesh_of(2, 2, names=("stage", "shard"))
    stage = dist.get_rank() // 2
    del model.blocks[1 - stage]
    if stage == 1:
        model.blocks = nn.ModuleDict({"1": model.blocks[0]})  # type: ignore[assignment]
        del model.embed
    for block in model.children():
        toys.fully_shard(block, mesh=stages["shard"]) if block is not model.blocks else None
    export_safetensors([model], folder)


def test_ranks_may_hold_different_tensors(tmp_path: Path) -> None:
    run_on_ranks(4, parts_of_a_pipeline, tmp_path)
    assert_holds(tmp_path, toys.toy(seed=3).state_dict())


# Adapters


class SplittingAdapter(FusingAdapter):
    """The way back too: gate and up apart, down transposed."""

    def to_file(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        if name == "gate_up.weight":
            return dict(zip(self.keys, tensor.split(self.sizes), strict=True))
        return {f"mlp.{name}": tensor.T}


def fused_round_trip(folder: Path, size: int) -> bool:
    torch.manual_seed(0)
    model = FusedBlock(SplittingAdapter())
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = toys.mesh_of(dist.get_world_size(), names=("shard",))
    toys.fully_shard(model, mesh=mesh)
    export_safetensors(model, folder, max_file_size=size)
    with torch.device("meta"):
        other = FusedBlock(SplittingAdapter())
    toys.fully_shard(other, mesh=mesh)
    materialize(other, checkpoint=folder)
    return all(torch.equal(toys.whole(p), expected[n]) for n, p in other.named_parameters())


@pytest.mark.parametrize("size", [10, 200, 10**6])
def test_a_fused_tensor_goes_into_its_parts_and_back(size: int, tmp_path: Path) -> None:
    """Parts of one native tensor may lie in two files."""
    assert run_on_ranks(2, fused_round_trip, tmp_path, size) == [True, True]
    torch.manual_seed(0)
    model = FusedBlock(None)
    gate, up = model.gate_up.weight.split((4, 6))
    expected = {"gate.weight": gate, "up.weight": up, "down.weight": model.down.weight.T}
    assert_holds(tmp_path, {f"mlp.{name}": tensor for name, tensor in expected.items()})
    assert (tmp_path / INDEX).exists() == (size < 1000)


def renamed_round_trip(sharding: str, folder: Path) -> dict[str, Tensor]:
    adapter = RenamingAdapter(lambda name: f"base.{name.replace('blocks', 'layers')}")
    model = toys.toy(seed=3, tied=True)
    model.state_dict_adapter = adapter
    export_safetensors(toys.SHARDINGS[sharding](model), folder, max_file_size="0.5KB")
    other = toys.toy(seed=4, tied=True)
    other.state_dict_adapter = adapter
    sharded = toys.SHARDINGS[sharding](other)
    materialize(sharded, checkpoint=folder)
    return {toys.bare_name(n): toys.whole(p) for n, p in sharded.named_parameters()}


@pytest.mark.parametrize(("sharding", "world"), [("fsdp", 2), ("ddp", 2), ("fsdp_tp", 4)])
def test_renamed_tensors_come_back(sharding: str, world: int, tmp_path: Path) -> None:
    expected = dict(toys.toy(seed=3, tied=True).named_parameters())
    for found in run_on_ranks(world, renamed_round_trip, sharding, tmp_path):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "base.layers.0.up.weight" in read(tmp_path)


class Narrowing(RenamingAdapter):
    """Files in other dtypes than the model: one narrower, one wider, one of integers."""

    def __init__(self) -> None:
        super().__init__(lambda name: name)

    def to_file(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        dtypes = {"embed.weight": torch.float16, "norm.weight": torch.float64}
        dtypes["norm.bias"] = torch.int8
        return {name: tensor.to(dtypes.get(name, tensor.dtype))}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_adapter_may_change_dtypes(dtype: torch.dtype | None, tmp_path: Path) -> None:
    model = toys.toy()
    model.norm.bias.data.fill_(3.0)
    model.state_dict_adapter = Narrowing()
    export_safetensors(model, tmp_path, dtype=dtype)
    expected = dict(model.state_dict())
    expected["embed.weight"] = expected["embed.weight"].half()
    expected["norm.weight"] = expected["norm.weight"].double()
    expected |= {} if dtype is None else {name: t.to(dtype) for name, t in expected.items()}
    expected["norm.bias"] = torch.full((6,), 3, dtype=torch.int8)
    assert_holds(tmp_path, expected)


class Wrong(RenamingAdapter):
    def __init__(self, change: Callable[[str, Tensor], Mapping[str, Tensor]]) -> None:
        super().__init__(lambda name: name)
        self.to_file = change  # type: ignore[method-assign]


def outcome(work: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    try:
        work(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong_adapter(kind: str, folder: Path) -> tuple[str, list[str]]:
    changes: dict[str, Any] = {
        "shape": Wrong(lambda name, tensor: {name: tensor.flatten()}),
        "key": Wrong(lambda name, tensor: {f"x.{name}": tensor}),
        "dtype": Wrong(lambda name, tensor: {name: tensor.to(torch.complex64)}),
        "raises": Wrong(lambda name, tensor: {name: {}["no"]}),
        "collides": RenamingAdapter(lambda name: name.replace("bias", "weight")),
    }
    model = toys.toy()
    model.state_dict_adapter = changes[kind]
    message = outcome(export_safetensors, toys.fsdp(model), folder)
    dist.barrier()
    return message, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", r"to_file gave \{'embed.weight': \(198,\)\} for embed.weight, and file_shapes"),
        ("key", r"to_file gave \{'x.embed.weight'"),
        ("dtype", "gave embed.weight in torch.complex64, which safetensors lacks"),
        ("raises", "KeyError"),
        ("collides", "gives blocks.0.norm.weight and blocks.0.norm.bias one key"),
    ],
)
def test_what_an_adapter_does_wrong_is_named_on_every_rank(
    kind: str, message: str, tmp_path: Path
) -> None:
    for found, files in run_on_ranks(2, wrong_adapter, kind, tmp_path):
        assert re.search(message, found), found
        assert files == []


# Memory, traffic, failures


class Sizes(TorchDispatchMode):
    """The largest tensor made, and the bytes sent and received."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.sent = self.received = self.collectives = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("c10d.send"):
            self.sent += args[0][0].nbytes
        elif name.startswith("c10d.recv"):
            self.received += args[0][0].nbytes
        elif name.startswith(("c10d", "_c10d")):
            self.collectives += 1
        elif type(result) is Tensor and result.dtype == torch.float32:
            self.largest = max(self.largest, result.numel())
        return result


def sizes(sharding: str, folder: Path) -> tuple[int, int, int, int, int]:
    model = toys.SHARDINGS[sharding](toys.toy(width=64))
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    with Sizes() as counted:
        export_safetensors(model, folder)
    held = sum(part.nbytes for part in local), max(part.numel() for part in local)
    return counted.sent, counted.received, counted.largest, *held


@pytest.mark.parametrize(("sharding", "world"), [("fsdp", 4), ("hsdp", 4), ("ddp", 2)])
def test_blocks_go_to_the_first_rank_alone(sharding: str, world: int, tmp_path: Path) -> None:
    """No other rank makes a whole tensor; every byte travels once, and replicas not at all."""
    (sent, received, largest, held, _), *others = run_on_ranks(world, sizes, sharding, tmp_path)
    plain = toys.toy(width=64)
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    assert sent == 0
    assert received == whole - held
    assert largest <= max(parameter.numel() for parameter in plain.parameters())
    assert sum(other[0] for other in others) == received
    for _, got, made, _, part in others:
        assert got == 0
        assert made <= part
    replicas = world // 2 if sharding == "hsdp" else world
    assert all(other[0] == 0 for other in others[(replicas if sharding == "hsdp" else 99) - 1 :])


class FullDisk(SafetensorsWriter):
    """Fails with the third tensor."""

    count = 0

    def add(self, key: str, tensor: Tensor, dtype: torch.dtype) -> None:
        FullDisk.count += 1
        if FullDisk.count == 3:
            raise OSError(28, "No space left on device")
        super().add(key, tensor, dtype)


def on_a_full_disk(folder: Path, agree_every: int) -> tuple[str, int]:
    model = toys.fsdp(toys.toy(seed=4))
    gathered = []
    real = export.gather_to_first

    def counting(item: Any, *args: Any) -> Any:
        gathered.append(item)
        return real(item, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullDisk, "count", 0)
        patch.setattr(safetensors_writing, "SafetensorsWriter", FullDisk)
        patch.setattr(export, "_AGREE_EVERY", agree_every)
        patch.setattr(export, "gather_to_first", counting)
        message = outcome(export_safetensors, model, folder, max_file_size=500)
    dist.barrier()
    return message, len(gathered)


@pytest.mark.parametrize(("agree_every", "gathered"), [(1, 3), (1 << 30, 14)])
def test_a_full_disk_is_an_error_everywhere_and_spoils_nothing(
    agree_every: int, gathered: int, tmp_path: Path
) -> None:
    """The earlier export stays whole; ranks stop together, soon or at the end."""
    before = toys.toy(seed=3)
    export_safetensors(before, tmp_path)
    for message, count in run_on_ranks(2, on_a_full_disk, tmp_path, agree_every):
        assert message.startswith("RuntimeError: saving failed on rank 0: OSError(28")
        assert count == gathered
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_holds(tmp_path, before.state_dict())


def abandoned(writer: Any, *unused: object) -> None:
    """The end of a `FolderWriter` whose process dies: its file is closed, and nothing else."""
    writer._writer.abandon()


def test_a_process_that_dies_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toys.toy()
    with monkeypatch.context() as patch:
        patch.setattr(FullDisk, "count", 0)
        patch.setattr(safetensors_writing, "SafetensorsWriter", FullDisk)
        patch.setattr(safetensors_writing.FolderWriter, "__exit__", abandoned)
        with pytest.raises(OSError, match="No space left"):
            export_safetensors(model, tmp_path, max_file_size=500)
    left = {path.name for path in tmp_path.iterdir()}
    assert left
    assert all(name.endswith(".part") for name in left)
    with pytest.raises(FileNotFoundError, match="neither safetensors files nor"):
        materialize(toys.toy(seed=1), checkpoint=tmp_path)
    export_safetensors(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_files_of_an_earlier_export_go_and_others_stay(tmp_path: Path) -> None:
    """From many files to one, to fewer, to more: never a stale shard or index."""
    others = ["adapter_model.safetensors", "model.bin", "other.part", "model.safetensors.bak"]
    for name in others:
        (tmp_path / name).write_text("mine")
    for seed, size in enumerate((300, 10**9, 3000, 500, 10**9)):
        model = toys.toy(seed=seed)
        export_safetensors(model, tmp_path, max_file_size=size)
        mine = [path for path in tmp_path.iterdir() if path.name in others]
        assert sorted(path.name for path in mine) == sorted(others)
        for path in mine:
            path.rename(tmp_path.parent / path.name)
        assert_holds(tmp_path, model.state_dict())
        for name in others:
            (tmp_path.parent / name).rename(tmp_path / name)


@pytest.mark.parametrize("size", [1, 300, 792, 1500])
def test_files_are_no_larger_than_asked_for(size: int, tmp_path: Path) -> None:
    model = toys.toy()
    export_safetensors(model, tmp_path, max_file_size=size)
    for file in tmp_path.glob("model-*"):
        tensors = load_file(file)
        held = sum(tensor.nbytes for tensor in tensors.values())
        assert held <= size or len(tensors) == 1
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model.state_dict().values())


# Configurations


class Config:
    def __init__(self, *, fails: bool = False, file: str = "config.json", **values: Any) -> None:
        self.fails, self.file = fails, file
        vars(self).update(values)

    def save_pretrained(self, folder: Path) -> None:
        if self.fails:
            raise KeyError("not to be saved")
        (Path(folder) / self.file).write_text(json.dumps(vars(self)))


def configured(folder: Path, fails: bool) -> tuple[str, dict[str, Any]]:
    model: Any = toys.toy()
    model.config = Config(dtype="float16", architectures=["Old"])
    model.generation_config = Config(fails=fails, file="generation_config.json", top_k=3)
    message = outcome(export_safetensors, toys.fsdp(model), folder, dtype=torch.bfloat16)
    dist.barrier()
    return message, vars(model.config)


def test_configs_are_saved_beside_the_weights(tmp_path: Path) -> None:
    """With the dtype and the class of what is saved; the model's own config does not change."""
    (tmp_path / "config.json").write_text("old")
    for message, own in run_on_ranks(2, configured, tmp_path, True):
        assert message == "RuntimeError: saving failed on rank 0: KeyError('not to be saved')"
        assert own["dtype"] == "float16"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    assert {message for message, _ in run_on_ranks(2, configured, tmp_path, False)} == {"nothing"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["ToyLM"])
    assert json.loads((tmp_path / "generation_config.json").read_text())["top_k"] == 3
    assert len(list(tmp_path.iterdir())) == 3


class Wrapper(nn.Module):
    """Adds to a base model, and passes its config on, as adapters of low rank do."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.config = base, base.config

    def get_base_model(self) -> nn.Module:
        return self.base


def test_the_config_of_a_wrapped_model_is_not_that_of_the_files(tmp_path: Path) -> None:
    """Who loads the folder must not take files under the wrapper's names for the base model."""
    base: Any = toys.toy()
    base.config = Config()
    model = Wrapper(base)
    export_safetensors(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_holds(tmp_path, model.state_dict())


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_file_size": 0}, "ValueError: max_file_size=0 must be a number of bytes"),
        ({"max_file_size": -5}, "ValueError: max_file_size=-5"),
        ({"max_file_size": "5"}, "ValueError: max_file_size='5' must be .* or a string such as"),
        ({"max_file_size": "GB"}, "ValueError: max_file_size='GB'"),
        ({"max_file_size": "0MB"}, "ValueError: max_file_size='0MB'"),
        ({"max_file_size": "iB"}, "ValueError: max_file_size='iB'"),
        ({"max_file_size": "5 iB"}, "ValueError: max_file_size='5 iB'"),
        ({"max_file_size": "-1GB"}, "ValueError: max_file_size='-1GB'"),
        ({"max_file_size": None}, "TypeError: max_file_size=None"),
        ({"max_file_size": True}, "TypeError: max_file_size=True"),
        ({"max_file_size": 1.5}, "TypeError: max_file_size=1.5"),
        ({"dtype": torch.int8}, r"ValueError: dtype=torch.int8 must be None or one of torch.bf"),
        ({"dtype": "bfloat16"}, "TypeError: dtype='bfloat16' must be None or one of torch.bf"),
        ({"folder": 3}, "TypeError: folder must be a path"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    found = outcome(export_safetensors, toys.toy(), **{"folder": tmp_path / "x", **options})
    assert re.match(message, found), found
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("size", "expected"),
    [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2MiB", 2 << 20), ("7B", 7), ("1TiB", 1 << 40), (9, 9)],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert export._bytes(size) == expected


def meta_model() -> nn.Module:
    model = toys.toy()
    model.norm.to("meta")
    return model


def refused(kind: str, folder: Path) -> tuple[str, int, bool]:
    models: dict[str, Callable[[], nn.Module]] = {
        "meta": meta_model,
        "lazy": lambda: nn.LazyLinear(3),
        "complex": lambda: nn.ParameterList([nn.Parameter(torch.ones(1, dtype=torch.complex64))]),
        "extra": lambda: nn.Sequential(Counting()),
        "file": toys.toy,
        "dcp": toys.toy,
    }
    before = sorted(folder.parent.iterdir())
    with Sizes() as counted:
        message = outcome(export_safetensors, models[kind](), folder)
    return message, counted.received, before == sorted(folder.parent.iterdir())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("meta", r"ValueError: norm.weight, norm.bias have no values yet; call materialize"),
        ("lazy", "ValueError: weight, bias have no values yet"),
        ("complex", "ValueError: 0 have dtypes that safetensors lacks; allowed: torch.bfloat16"),
        ("extra", "TypeError: safetensors hold .* has more: 0._extra_state; keep extra state"),
        ("file", "ValueError: folder='.*/x' is a file"),
        ("dcp", "ValueError: folder='.*/x' holds a distributed checkpoint"),
    ],
)
def test_models_and_folders_that_cannot_be(kind: str, message: str, tmp_path: Path) -> None:
    """Raised before anything is gathered or written, on every rank."""
    if kind == "file":
        (tmp_path / "x").write_text("mine")
    if kind == "dcp":
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / ".metadata").write_text("mine")
    for found, received, untouched in run_on_ranks(2, refused, kind, tmp_path / "x"):
        assert re.match(message, found), found
        assert untouched
        assert received == 0


def on_one_rank_only(folder: Path) -> str:
    model = toys.toy() if dist.get_rank() else meta_model()
    return outcome(export_safetensors, model, folder)


def test_what_only_one_rank_raises_is_raised_on_all(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, on_one_rank_only, tmp_path)
    assert first.startswith("ValueError: norm.weight, norm.bias have no values yet")
    assert second.startswith("RuntimeError: saving failed on rank 0: ValueError('norm.weight")


def differing(folder: Path) -> str:
    model = toys.toy(width=6 if dist.get_rank() else 4)
    return outcome(export_safetensors, model, folder)


def test_ranks_that_hold_different_models(tmp_path: Path) -> None:
    for message in run_on_ranks(2, differing, tmp_path):
        assert message.startswith(
            "ValueError: embed.weight is no one tensor over the ranks: [33, 4] torch.float32 on "
            "one, [33, 6] torch.float32 on rank 1"
        )


def on_a_part_of_the_ranks(folder: Path) -> list[str]:
    """Two meshes of two ranks each; the second is not told to the export at first."""
    mesh = toys.mesh_of(2, 2, names=("copy", "dp_shard"))["dp_shard"]
    group = mesh.get_group()
    model = toys.shard_units(toys.toy(seed=3), mesh)
    record_mesh_context(model, MeshContext.from_meshes(mesh, strategy_config=FSDP2Config()))
    own = folder / str(dist.get_rank() // 2)
    messages = [outcome(export_safetensors, model, own)]
    if dist.get_rank() < 2:
        export_safetensors(model, own, process_group=group)
    other = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        messages.append(outcome(export_safetensors, toys.toy(), own, process_group=other))
    return messages


def test_a_mesh_of_some_ranks(tmp_path: Path) -> None:
    results = run_on_ranks(4, on_a_part_of_the_ranks, tmp_path)
    for messages in results:
        assert messages[0].startswith("ValueError: the model is on a mesh of 2 ranks, and 4 would")
    assert results[1][1].startswith("ValueError: rank 1 is not in process_group")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert_holds(tmp_path / "0", toys.toy(seed=3).state_dict())


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two different tensors have one name: weight, bias"):
        export_safetensors([nn.Linear(2, 2), nn.Linear(2, 2)], tmp_path)


def missing_ranks() -> str:
    held = gathering.HeldTensor("w", (4,), torch.float32, False, ((0, 2),), "cpu")
    return outcome(gathering.plan_gathering, [[held]])  # type: ignore[arg-type]


def test_blocks_that_are_not_the_tensor() -> None:
    assert "the ranks hold 2 of the 4 elements of w [4]; pass as process_group=" in missing_ranks()


def test_memory_shared_by_two_parameters_is_written_twice(tmp_path: Path) -> None:
    """The library's `save_file` refuses it."""
    model = nn.ParameterList([nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.zeros(2))])
    model[1].data = model[0].data[1:3]
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(dict(model.state_dict()), tmp_path / "x")
    export_safetensors(model, tmp_path)
    assert_holds(tmp_path, model.state_dict())


class Adapted(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 1)})


def export_adapted(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Adapted(nn.Linear(4, 4)), nn.Linear(4, 4)))
    with pytest.raises(
        ValueError,
        match=r"^1\.0 \(of 1 layers\) has an adapter .*merge_and_unload\(\) returns, or save",
    ):
        export_safetensors(model, folder)


def test_adapters_are_refused_on_every_rank_before_anything_is_written(tmp_path: Path) -> None:
    run_on_ranks(2, export_adapted, tmp_path / "out")
    assert not (tmp_path / "out").exists()
