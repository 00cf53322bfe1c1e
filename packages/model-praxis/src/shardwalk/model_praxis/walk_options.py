"""What a walk over the policy is asked for, and what is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwalk.mesh import (
    MoEParallelizerConfig,
    get_fsdp_dp_mesh,
    normalize_activation_checkpointing,
)
from shardwalk.mesh.policies import default_mp_policy
from shardwalk.parallelizer_core.base_models import first_tensor_outside

_ONLY: dict[str, tuple[object, ...]] = {
    "sequence_parallel": (False,),
    "tp_shard_plan": (None,),
    "enable_async_tensor_parallel": (False,),
    "enable_compile": (False,),
    "activation_checkpointing_scope": ("all", None),
    "frozen_multimodal_sharding": ("root",),
}


@dataclass(frozen=True, kw_only=True)
class DenseOptions:
    """The arguments of `ModelParallelizer._apply`, as far as they have a meaning here or must not.

    Raises TypeError for any other, and ValueError for an unknown checkpointing mode or a
    negative depth.
    """

    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    sequence_parallel: bool = False
    activation_checkpointing: bool | str = False
    tp_shard_plan: Any = None
    dp_replicate_mesh_name: str = "dp_replicate"
    dp_shard_cp_mesh_name: str = "dp_shard_cp"
    tp_mesh_name: str = "tp"
    enable_async_tensor_parallel: bool = False
    enable_compile: bool = False
    enable_fsdp2_prefetch: bool = True
    fsdp2_backward_prefetch_depth: int = 2
    fsdp2_forward_prefetch_depth: int = 1
    reshard_after_forward: bool | None = None
    activation_checkpointing_scope: Any = "all"
    frozen_multimodal_sharding: Any = "root"
    reapply_trainability: Callable[[nn.Module], None] | None = None

    def __post_init__(self) -> None:
        normalize_activation_checkpointing(self.activation_checkpointing)
        for name in ("forward_prefetch_depth", "backward_prefetch_depth"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")

    def data_mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        """The mesh of the units: 1-D, or with replicas 2-D."""
        return get_fsdp_dp_mesh(
            device_mesh, self.dp_replicate_mesh_name, self.dp_shard_cp_mesh_name
        )

    @property
    def forward_prefetch_depth(self) -> int:
        """Blocks gathered ahead in the forward; 0 leaves it to torch."""
        return self.fsdp2_forward_prefetch_depth if self.enable_fsdp2_prefetch else 0

    @property
    def backward_prefetch_depth(self) -> int:
        """Blocks gathered ahead in the backward; 0 leaves it to torch."""
        return self.fsdp2_backward_prefetch_depth if self.enable_fsdp2_prefetch else 0

    def refuse(self, device_mesh: DeviceMesh) -> None:
        """Refuse options that are set to what the policy cannot have, and such meshes.

        Raises:
            ValueError: names the option or the axis, its value and what to use.
        """
        for name, allowed in _ONLY.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"{name}={value!r} means nothing for a Praxis policy, which is parallelized "
                    f"over data and experts; use {name}={allowed[0]!r}"
                )
        names = device_mesh.mesh_dim_names or ()
        for axis in (self.tp_mesh_name, "cp", "pp"):
            size = device_mesh.size(names.index(axis)) if axis in names else 1
            if size > 1:
                raise ValueError(
                    f"{axis}_size={size}: a Praxis policy is parallelized over data and experts "
                    f"only; use {axis}_size=1 and give those ranks to dp_size"
                )


def mp_policy_or_default(mp_policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """None is bf16 parameters, float32 reduction, no casts of inputs."""
    return mp_policy or default_mp_policy()


def refuse_moe_config(config: MoEParallelizerConfig) -> None:
    """Refuse what the config for experts says of a head and of an inner model.

    Raises:
        ValueError: names the field.
    """
    if config.lm_head_precision is not None:
        raise ValueError(
            f"lm_head_precision={config.lm_head_precision}: a Praxis policy has no language-model "
            f"head; leave lm_head_precision unset"
        )
    if not config.wrap_outer_model:
        raise ValueError(
            "wrap_outer_model=False: the root unit of a Praxis policy is the policy; use "
            "wrap_outer_model=True"
        )


def refuse_arguments(
    mesh: object, moe_mesh: object, *, activation_checkpointing: object, **flags: object
) -> None:
    """Refuse meshes that are none or have no ep axis, and options of another type.

    Raises:
        TypeError: names the argument.
        ValueError: names the axes of the moe mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, not {mesh!r}")
    if not isinstance(moe_mesh, DeviceMesh | None):
        raise TypeError(f"moe_mesh must be a DeviceMesh or None, not {moe_mesh!r}")
    if moe_mesh is not None and "ep" not in (moe_mesh.mesh_dim_names or ()):
        axes = moe_mesh.mesh_dim_names
        raise ValueError(
            f"moe_mesh has {f'the axes {axes}' if axes else 'unnamed axes'}, and none is called "
            f"'ep'; name its axes with mesh_dim_names, or pass moe_mesh=None to spread no experts"
        )
    if not isinstance(activation_checkpointing, bool | str):
        raise TypeError(
            f"activation_checkpointing={activation_checkpointing!r} must be True, False, 'full' or "
            f"'selective'"
        )
    for name, value in flags.items():
        may_be_none = name == "reshard_after_forward"
        if not isinstance(value, bool) and not (value is None and may_be_none):
            raise TypeError(
                f"{name}={value!r} must be True{', False or None' if may_be_none else ' or False'}"
            )


def refuse_moe_mesh(ep: DeviceMesh, shards: DeviceMesh | None, mesh: DeviceMesh) -> None:
    """Refuse experts that lie over other ranks than the rest.

    Raises:
        ValueError: names the sizes.
    """
    shard_ranks = 1 if shards is None else shards.size()
    if ep.size() * shard_ranks != mesh.size():
        raise ValueError(
            f"moe_mesh has {ep.size()} x {shard_ranks} ranks (ep x the rest), and mesh has "
            f"{mesh.size()}: all data-parallel ranks hold experts, so that the two must be as large"
        )


def refuse_surroundings(policy: nn.Module, model: nn.Module) -> None:
    """Refuse a wrapper that holds parameters or buffers around the policy, which no unit takes.

    Raises:
        ValueError: names the first one.
    """
    outside = first_tensor_outside(policy, model)
    if outside is not None:
        raise ValueError(
            f"{type(model).__name__} holds {outside} outside of its policy, where no unit would "
            f"shard it; put it into the policy, or parallelize the policy by itself"
        )
