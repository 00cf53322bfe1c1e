"""Toy models and shardings that the tests of gradients, materialization and state dicts share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shardwalk.parallelizer_core.testing import cached

VOCABULARY, WIDTH, HIDDEN = 33, 6, 10


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class ToyLM(nn.Module):
    """Odd sizes, so that no shard is even."""

    def __init__(self, *, layers: int = 2, tied: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def toy(seed: int = 0, **kwargs: object) -> ToyLM:
    torch.manual_seed(seed)
    return ToyLM(**kwargs)  # type: ignore[arg-type]


def mesh_of(*sizes: int, names: tuple[str, ...]) -> DeviceMesh:
    def make() -> DeviceMesh:
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)

    return cached(("state_toys", sizes, names), make)


def shard_units(model: ToyLM, mesh: DeviceMesh, **kwargs: object) -> ToyLM:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)  # type: ignore[call-overload]
    return fully_shard(model, mesh=mesh, **kwargs)  # type: ignore[call-overload,no-any-return]


def fsdp(model: ToyLM, **kwargs: object) -> nn.Module:
    return shard_units(model, mesh_of(dist.get_world_size(), names=("shard",)), **kwargs)


def hsdp(model: ToyLM, **kwargs: object) -> nn.Module:
    return shard_units(model, mesh_of(2, 2, names=("replicate", "shard")), **kwargs)


def tp_split(model: ToyLM, tp: DeviceMesh) -> ToyLM:
    for block in model.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tp_only(model: ToyLM) -> nn.Module:
    return tp_split(model, mesh_of(2, names=("tp",)))


def fsdp_tp(model: ToyLM, **kwargs: object) -> nn.Module:
    """Two axes on one dimension: the shards of `up` are strided."""
    mesh = mesh_of(2, 2, names=("shard", "tp"))
    return shard_units(tp_split(model, mesh["tp"]), mesh["shard"], **kwargs)


def ddp(model: ToyLM, **options: bool) -> nn.Module:
    return DistributedDataParallel(model, **options)


def single(model: ToyLM) -> nn.Module:
    return model


SHARDINGS: Mapping[str, Callable[..., nn.Module]] = {
    "fsdp": fsdp, "hsdp": hsdp, "tp": tp_only, "fsdp_tp": fsdp_tp, "ddp": ddp, "single": single,
}  # fmt: skip
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Reductions(TorchDispatchMode):
    """Counts reduce-scatters and all-reduces (CommDebugMode's module hooks warn in torch 2.13)."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "reduce" in str(func) and str(func).startswith(("c10d", "_c10d")):
            self.count += 1
        return func(*args, **(kwargs or {}))


def batch(rows: int = 8, length: int = 5, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].clone()


def data_rank(sharding: str) -> tuple[int, int]:
    """This rank's number among those that see different rows, and how many there are."""
    if sharding in {"tp", "single"}:
        return 0, 1
    tp = 2 if sharding == "fsdp_tp" else 1
    return dist.get_rank() // tp, dist.get_world_size() // tp


def my_rows(sharding: str, *tensors: Tensor) -> list[Tensor]:
    rank, ranks = data_rank(sharding)
    return [tensor.chunk(ranks)[rank] for tensor in tensors]


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def token_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x).flatten(0, 1).float()
    return F.cross_entropy(logits, y.flatten(), reduction="none")


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def bare_name(name: str) -> str:
    return name.removeprefix("module.")


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        bare_name(name): whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers and tensors in plain attributes."""
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        found |= {f"{name}.{k}": v for k, v in vars(module).items() if isinstance(v, Tensor)}
    return found


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Fill new memory with NaN for a while, so that a read of what nobody wrote shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(False)
