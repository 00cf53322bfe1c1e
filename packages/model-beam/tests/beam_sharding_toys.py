"""Contexts, sidecars and comparisons that the tests of Beam's sharding share."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from beam_toys import randomize, tiny_beam, token_ids
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardwalk.mesh import (
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    MoEParallelizerConfig,
    ParallelismSizes,
)
from shardwalk.model_beam import BeamForCausalLM
from shardwalk.model_beam.parallelization import BeamModelParallelizer
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.fsdp2.dtype_units import shard_unit
from shardwalk.parallelizer_core.testing import cached

BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "cast_forward_inputs": True}
FULL = {"param_dtype": None, "reduce_dtype": None}


class CastingSidecar(BeamModelParallelizer):
    """Makes units as torch does by default: the policy of a block casts all that comes in."""

    def _fully_shard_module(self, module: nn.Module, **kwargs: Any) -> nn.Module:
        given = kwargs["mp_policy"]
        values = {each.name: getattr(given, each.name) for each in fields(MixedPrecisionPolicy)}
        # The plain policy, under which torch casts all that comes in.
        kwargs["mp_policy"] = MixedPrecisionPolicy(**values)
        return shard_unit(module, self._fully_shard_module, **kwargs)


class CastingBeam(BeamForCausalLM):
    """Beam with the fault that its sidecar is there to prevent."""

    parallelizer = CastingSidecar()


def context(
    *,
    sizes: dict[str, int] | None = None,
    moe: dict[str, Any] | None = None,
    activation_checkpointing: Any = False,
    **strategy: Any,
) -> MeshContext:
    """A context over all ranks, its meshes made once per process; bf16 unless a policy is given."""
    given = sizes or {}

    def make() -> MeshContext:
        return DistributedSetup.build(
            "fsdp2", parallelism_sizes=ParallelismSizes(**given), moe_parallel_config={}
        ).mesh_context

    made = cached(("beam_sharding_toys", tuple(given.items())), make)
    strategy.setdefault("mp_policy", BF16)
    return MeshContext.from_meshes(
        made.device_mesh,
        made.moe_mesh,
        strategy_config=FSDP2Config(**strategy),
        moe_parallel_config=None if moe is None else MoEParallelizerConfig(**moe),
        activation_checkpointing=activation_checkpointing,
    )


def build(
    model: type[BeamForCausalLM] = BeamForCausalLM,
    *,
    dtype: torch.dtype = torch.float32,
    frozen: str | None = None,
    in_dict: bool = False,
    **changes: Any,
) -> BeamForCausalLM:
    """The same weights whatever the class, the dtype and the container of the blocks."""
    built = model(tiny_beam(**changes).config)
    randomize(built)
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    if in_dict:
        blocks = {f"block_{i}": block for i, block in enumerate(built.model.blocks)}
        built.model.layers = nn.ModuleDict(blocks)
    return built.to(dtype)


def sharded(
    model: type[BeamForCausalLM] = BeamForCausalLM,
    *,
    wrapped: str | None = None,
    built: dict[str, Any] | None = None,
    **options: Any,
) -> BeamForCausalLM:
    """A parallelized model; torch's checkpoint wrapper stands inside or outside of the units."""
    whole = build(model, **(built or {}))
    if wrapped == "inside":
        wrap_blocks(whole)
    parallel = parallelize_model(whole, context(**options))
    assert isinstance(parallel, BeamForCausalLM)
    if wrapped == "outside":
        wrap_blocks(parallel)
    return parallel


def wrap_blocks(model: BeamForCausalLM) -> None:
    layers = model.model.layers
    for name, block in list(layers.named_children()):
        setattr(layers, name, checkpoint_wrapper(block))


def rows_of_rank() -> Tensor:
    """Two rows of tokens, other ones on each rank."""
    return token_ids(2, 32, seed=10 + dist.get_rank())


def train(model: nn.Module) -> Tensor:
    """The logits of this rank's rows; leaves the gradients of its loss."""
    rows = rows_of_rank()
    output = model(rows, labels=rows)
    output.loss.backward()
    logits: Tensor = output.logits.detach()
    return logits


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("block_", "")


def mean_gradients(reference: nn.Module) -> dict[str, Tensor]:
    """The fp32 mean over the ranks of the gradients that each has of its own rows."""
    means = {}
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            mean = parameter.grad.float()
            dist.all_reduce(mean)
            means[plain_name(name)] = mean / dist.get_world_size()
    return means


def relative(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm())
