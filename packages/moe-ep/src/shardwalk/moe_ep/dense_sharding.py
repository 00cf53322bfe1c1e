"""How the dense path shards a model whose experts are units already."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwalk.mesh.policies import default_mp_policy
from shardwalk.moe_ep.heads import shares_weights
from shardwalk.parallelizer_core import ModelParallelizer
from shardwalk.parallelizer_core.fp32_pins import pin_fp32_parameters
from shardwalk.parallelizer_core.fsdp2.root import watch_root
from shardwalk.parallelizer_core.fsdp2.walk import UnitOptions
from shardwalk.parallelizer_core.layers import has_forward

_INNER = "model"


def shard_around_experts(sidecar: ModelParallelizer, *, wraps_outer: bool) -> ModelParallelizer:
    """A copy of `sidecar` whose `_apply_fsdp_sharding` knows which module is the root.

    Args:
        wraps_outer: whether the whole model is the root unit; else its inner model is.
    """
    sharding = _Sharding(
        shard=sidecar._apply_fsdp_sharding,
        door=sidecar._fully_shard_module,
        wraps_outer=wraps_outer,
    )
    around = copy.copy(sidecar)
    vars(around)["_apply_fsdp_sharding"] = sharding
    return around


def check_inner_root(model: nn.Module) -> None:
    """Refuse a model whose inner model cannot be the root unit.

    Raises:
        ValueError: there is none; a parameter around it that no unit would hold, or that is shared
            with it.
    """
    if not _has_inner(model):
        raise ValueError(
            f"wrap_outer_model=False makes {_INNER!r} the root unit, and {type(model).__name__} "
            f"has no module of that name; use wrap_outer_model=True"
        )
    inner = model.get_submodule(_INNER)
    around = _parts_around(model, inner)
    bare = [name for name, _ in model.named_parameters(recurse=False)]
    uncalled = [type(part).__name__ for part in around if not has_forward(part)]
    if bare or uncalled:
        raise ValueError(
            f"wrap_outer_model=False makes {_INNER!r} the root unit, which leaves "
            f"{', '.join(bare or uncalled)} of {type(model).__name__} without a unit; use "
            f"wrap_outer_model=True"
        )
    if any(shares_weights(model, part) for part in (inner, *around)):
        raise ValueError(
            f"wrap_outer_model=False makes units of {_INNER!r} and of what is around it, and they "
            f"share a weight; untie them, or use wrap_outer_model=True"
        )


@dataclass(frozen=True, kw_only=True)
class _Sharding:
    """Stands in for `_apply_fsdp_sharding`, which it calls as `shard`."""

    shard: Callable[..., None]
    door: Callable[..., nn.Module]
    wraps_outer: bool

    def __call__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None,
        offload_policy: OffloadPolicy | None = None,
        **options: Any,
    ) -> None:
        pin_fp32_parameters(module)  # those that tensor parallelism replaced too
        if self.wraps_outer or not _has_inner(module):
            self.shard(module, mesh, mp_policy, offload_policy, **options)
            return
        inner = module.get_submodule(_INNER)
        self.shard(inner, mesh, mp_policy, offload_policy, **options)
        watch_root(inner, mp_policy or default_mp_policy())
        units = UnitOptions(mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)
        for part in _parts_around(module, inner):
            # The backward starts with it.
            self.door(part, **units.for_unit(reshard_after_forward=False, is_root=True))
            watch_root(part, mp_policy or default_mp_policy())


def _has_inner(model: nn.Module) -> bool:
    return isinstance(getattr(model, _INNER, None), nn.Module)


def _parts_around(model: nn.Module, inner: nn.Module) -> list[nn.Module]:
    """The other children with parameters, each once."""
    return [
        child
        for child in dict.fromkeys(model.children())
        if child is not inner and any(True for _ in child.parameters())
    ]
