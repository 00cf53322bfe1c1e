"""Subjects made with torch alone, right ones and broken ones, to try the parity checker on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core.testing import TinyDecoder, cached

BF16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)
BF16_REDUCE = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False
)
FP32 = MixedPrecisionPolicy()


def bare_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    return cached(("bare", shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def lonely_mesh() -> DeviceMesh:
    """A mesh of this rank alone."""
    return bare_mesh((dist.get_world_size(), 1))["shard"]


def shard(
    model: Any, setup: Any, *, shape: tuple[int, ...], policy: MixedPrecisionPolicy = FP32
) -> nn.Module:
    """One unit per block and table, and the root."""
    mesh = bare_mesh(shape)
    units = [*model.layers]
    if model.head.weight is not model.embed.weight:
        units += [model.embed, model.head]
    for unit in units:
        if not isinstance(unit, FSDPModule):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
    sharded: nn.Module = fully_shard(model, mesh=mesh, mp_policy=policy)
    return sharded


class Fp32Head(nn.Linear):
    """Computes in fp32, whatever its weight is rounded to."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.weight.float())


def decoder_with_fp32_head() -> TinyDecoder:
    model = TinyDecoder()
    model.head = Fp32Head(18, 61, bias=False)
    return model


def shard_with_island(model: Any, setup: Any, *, shape: tuple[int, ...]) -> nn.Module:
    """bf16 but for the head, whose unit is fp32."""
    fully_shard(model.head, mesh=bare_mesh(shape), mp_policy=FP32)
    return shard(model, setup, shape=shape, policy=BF16)


class _Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


halve: Any = _Halve.apply


class Halving(nn.Linear):
    """A linear layer whose weight's gradient is divided once too often."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, halve(self.weight), self.bias)


def shard_dividing_twice(model: Any, setup: Any, *, shape: tuple[int, ...]) -> nn.Module:
    model.layers[1].up.__class__ = Halving
    return shard(model, setup, shape=shape)


def shard_with_a_lonely_unit(model: Any, setup: Any, *, shape: tuple[int, ...]) -> nn.Module:
    fully_shard(model.layers[1], mesh=lonely_mesh())
    return shard(model, setup, shape=shape)


def shard_unequal_replicas(model: Any, setup: Any, *, shape: tuple[int, ...]) -> nn.Module:
    if bare_mesh(shape)["replicate"].get_local_rank() == 1:
        with torch.no_grad():
            model.layers[2].gate.weight.mul_(1 + 1e-6)
    return shard(model, setup, shape=shape)


def shard_untied(model: Any, setup: Any, *, shape: tuple[int, ...]) -> nn.Module:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return shard(model, setup, shape=shape)


def shard_frozen(model: Any, setup: Any, *, shape: tuple[int, ...]) -> nn.Module:
    model.norm.weight.requires_grad_(False)
    return shard(model, setup, shape=shape)


def shard_wrong_buffer(model: Any, setup: Any, *, shape: tuple[int, ...]) -> nn.Module:
    model.rotary.frequencies[0] += 1e-4
    return shard(model, setup, shape=shape)


def shard_wrong_start(model: Any, setup: Any, *, shape: tuple[int, ...]) -> nn.Module:
    with torch.no_grad():
        model.layers[0].out.bias[3] += 1e-7
    return shard(model, setup, shape=shape)


def shard_extra_parameter(model: Any, setup: Any, *, shape: tuple[int, ...]) -> nn.Module:
    model.norm.bias = nn.Parameter(torch.zeros(18))
    return shard(model, setup, shape=shape)


class Scale:
    """Multiplies the sum of token losses."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, token_losses: Tensor) -> Tensor:
        return token_losses.sum() * self.factor


def mean_per_rank(setup: Any, counts: Sequence[int]) -> Callable[[Tensor], Tensor]:
    return Scale(1 / sum(counts))


def skip_last(model: nn.Module, micro_batches: Iterable[Any]) -> Iterator[Any]:
    yield from list(micro_batches)[:-1]


def never_clip(model: nn.Module, max_norm: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


def norm_of_the_shard(model: nn.Module, max_norm: float) -> Tensor:
    local = [cast("DTensor", p.grad).to_local() for p in model.parameters()]
    return torch.nn.utils.get_total_norm(local)


def lose_second_step(model: nn.Module, max_norm: float) -> Tensor:
    """Right norms, but the second step misses one parameter's gradient."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if getattr(model, "stepped", False):
        model.get_parameter("layers.0.down.weight").grad = None
    model.stepped = True  # type: ignore[assignment]
    return norm
