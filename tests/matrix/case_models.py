"""Contexts, data and measures that the tests of the failure cases share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardwalk.mesh import DDPConfig, DistributedSetup, FSDP2Config, MeshContext, ParallelismSizes
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.testing import TinyDecoder, cached

VOCABULARY = 61
FULL = {"param_dtype": None, "reduce_dtype": None}
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "cast_forward_inputs": True}
SIZES: dict[str, dict[str, int]] = {"fsdp": {}, "hsdp": {"dp_replicate_size": 2}, "ddp": {}}


def context(kind: str = "fsdp", **strategy: Any) -> MeshContext:
    """A context over all ranks, its mesh made once per process; fp32 unless a policy is given."""

    def make() -> MeshContext:
        sizes = ParallelismSizes(**SIZES[kind])
        name = "ddp" if kind == "ddp" else "fsdp2"
        return DistributedSetup.build(name, parallelism_sizes=sizes).mesh_context

    mesh = cached(("cases", kind), make).device_mesh
    config: Any = DDPConfig(**strategy) if kind == "ddp" else None
    return MeshContext.from_meshes(
        mesh, strategy_config=config or FSDP2Config(**{"mp_policy": FULL, **strategy})
    )


def parallel(model: nn.Module, kind: str = "fsdp", **strategy: Any) -> nn.Module:
    """The model, parallelized over all ranks and by nothing but `parallelize_model`."""
    return parallelize_model(model, context(kind, **strategy))


def seeded(make: Callable[..., nn.Module] = TinyDecoder, /, seed: int = 3, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return make(**kwargs)


def on_meta(make: Callable[..., nn.Module] = TinyDecoder, /, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return make(**kwargs)


def tokens(rows: int = 4, length: int = 8, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


def mine(*tensors: Tensor) -> Any:
    """This rank's rows; without process groups, all of them."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    parts = [tensor.tensor_split(ranks)[rank] for tensor in tensors]
    return parts if len(parts) > 1 else parts[0]


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    output = model(ids)
    found: Tensor = getattr(output, "logits", output)
    return found.float()


def mean_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of the next token, meaned over rows of one length."""
    return F.cross_entropy(logits_of(model, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else whole(p.grad)
        for name, p in unwrap_model(model).named_parameters()
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in unwrap_model(model).named_parameters()}


def assert_equal(
    found: dict[str, Tensor | None], expected: dict[str, Tensor | None], *, tolerance: float = 1e-5
) -> None:
    """Differences stay below the tolerance, relative to the largest value of each tensor.

    A tensor of noise (a gradient that is zero in exact arithmetic) is measured by the largest one
    of all.
    """
    assert found.keys() == expected.keys()
    largest = {n: v.abs().max().item() for n, v in expected.items() if v is not None}
    noise = 1e-3 * max(largest.values())
    for name, value in expected.items():
        other = found[name]
        if value is None or other is None:
            assert value is other, name
            continue
        limit = tolerance * max(largest[name], noise)
        difference = (other.double() - value.double()).abs().max().item()
        assert difference <= limit, f"{name}: differs by {difference}, allowed are {limit}"
