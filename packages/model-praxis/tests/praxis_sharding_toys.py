"""Contexts and meshes over all ranks, made once per process, for the tests of the sidecar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardwalk.mesh import (
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    MoEParallelizerConfig,
    ParallelismSizes,
)
from shardwalk.parallelizer_core.testing import cached

FULL = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def context(
    sizes: dict[str, int] | None = None,
    *,
    moe: dict[str, Any] | None = None,
    checkpointing: Any = False,
    reapply: Callable[[nn.Module], None] | None = None,
    **strategy: Any,
) -> MeshContext:
    """A context over all ranks; fp32 unless a policy is given."""
    given = sizes or {}

    def make() -> MeshContext:
        sizes = ParallelismSizes(**given)
        return DistributedSetup.build(parallelism_sizes=sizes, moe_parallel_config={}).mesh_context

    made = cached(("praxis", tuple(given.items())), make)
    needs_moe = moe is not None or made.ep_size > 1
    return MeshContext.from_meshes(
        made.device_mesh,
        made.moe_mesh if needs_moe else None,
        strategy_config=FSDP2Config(**{"mp_policy": FULL, **strategy}),
        moe_parallel_config=None if moe is None else MoEParallelizerConfig(**moe),
        activation_checkpointing=checkpointing,
        reapply_trainability=reapply,
    )


def mesh_of(*sizes: int, names: tuple[str, ...] = ("data",)) -> DeviceMesh:
    """A mesh over all ranks that no context made, one-dimensional without sizes."""
    shape = sizes or (dist.get_world_size(),)
    return cached((names, shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def whole(tensor: Any) -> Any:
    """A tensor of all ranks, as a plain one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
