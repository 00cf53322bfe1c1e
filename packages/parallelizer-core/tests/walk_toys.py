"""Small models that the tests of the walk share, and their contexts."""

import torch
from torch import nn

from shardwalk.mesh import DistributedSetup, FSDP2Config, MeshContext, ParallelismSizes
from shardwalk.parallelizer_core import describe_units, parallelize_model
from shardwalk.parallelizer_core.testing import cached

FULL = {"param_dtype": None, "reduce_dtype": None}
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "cast_forward_inputs": True}


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 10)
        self.down = nn.Linear(10, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head; odd sizes."""

    def __init__(self, *, tied: bool = False, blocks: int = 3, block=Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 13, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Wrapper(nn.Module):
    """Names its base model, as a wrapper that adds adapters does."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def get_base_model(self):
        return self.base

    def forward(self, *args):
        return self.base(*args)


def ids(rows: int = 2, length: int = 5) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length) % 13


def context(*, dp_replicate_size: int | None = None, **strategy) -> MeshContext:
    """A context over all ranks, its mesh made once per process; fp32 unless a policy is given."""

    def make() -> MeshContext:
        sizes = ParallelismSizes(dp_replicate_size=dp_replicate_size)
        return DistributedSetup.build("fsdp2", parallelism_sizes=sizes).mesh_context

    made = cached(("walk_toys", dp_replicate_size), make)
    strategy.setdefault("mp_policy", FULL)
    return MeshContext.from_meshes(made.device_mesh, strategy_config=FSDP2Config(**strategy))


def sharded(make=Decoder, /, *, dp_replicate_size=None, options=None, **kwargs) -> nn.Module:
    """The seeded model, parallelized over all ranks."""
    torch.manual_seed(7)
    mesh_context = context(dp_replicate_size=dp_replicate_size, **(options or {}))
    return parallelize_model(make(**kwargs), mesh_context)


def unit_names(model: nn.Module) -> list[str]:
    return [unit.name for unit in describe_units(model)]


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None
        if parameter.grad is None
        else getattr(parameter.grad, "full_tensor", lambda g=parameter.grad: g)()
        for name, parameter in model.named_parameters()
    }
