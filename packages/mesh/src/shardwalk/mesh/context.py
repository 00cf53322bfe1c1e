"""The runtime context of a parallelized model: meshes and policies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwalk.mesh.axes import MeshAxisName as Axis
from shardwalk.mesh.checkpointing_modes import (
    ActivationCheckpointingMode,
    ResolvedActivationCheckpointing,
    merge_activation_checkpointing,
)
from shardwalk.mesh.config import DistributedStrategyConfig, MoEParallelizerConfig
from shardwalk.mesh.context_checks import check_context_value, check_cp
from shardwalk.mesh.device_meshes import (
    axis_size,
    build_device_mesh,
    build_moe_mesh,
    check_cp_degrees,
)
from shardwalk.mesh.members import ensure_process_group, local_group, mesh_members
from shardwalk.mesh.process_groups import minutes
from shardwalk.mesh.sizes import ParallelismSizes
from shardwalk.mesh.strategies import check_offload, check_strategy, check_strategy_sizes
from shardwalk.mesh.validation import check_timeout_minutes, nearest

__all__ = ["MeshContext"]


@dataclass(eq=False)
class MeshContext:
    """What ``parallelize_model`` works with: the meshes of a model and the policies for it.

    Sizes are read from the meshes; without one they are 1 (None for ``dp_size`` and
    ``dp_replicate_size``). ``strategy_config`` None with a mesh means ``FSDP2Config()``.
    ``activation_checkpointing`` becomes False, "full" or "selective", whether it was asked for here
    or in the strategy. ``process_group`` is the group of all ranks of a mesh that leaves some out,
    else None.

    ``device_mesh`` may have the axes pp, dp, dp_replicate, dp_shard, dp_shard_cp, cp and tp, as far
    as they do not overlap; ``moe_mesh`` has ep_replicate, ep_shard and ep.

    Raises ValueError for other axes, for sizes that the strategy does not support, for two
    different checkpointing modes, and when ring x Ulysses degree is not ``cp_size``. Assignments
    are checked as well: a strategy against the meshes and the mode, and AttributeError for a name
    that is none of these.
    """

    device_mesh: DeviceMesh | None = field(default=None, repr=False)
    moe_mesh: DeviceMesh | None = field(default=None, repr=False)
    process_group: dist.ProcessGroup | None = field(default=None, repr=False)
    strategy_config: DistributedStrategyConfig | None = None
    moe_parallel_config: MoEParallelizerConfig | None = None
    activation_checkpointing: ActivationCheckpointingMode = False
    reapply_trainability: Callable[[nn.Module], None] | None = field(default=None, repr=False)
    cp_ring_degree: int = 1
    cp_ulysses_degree: int | None = None

    def __post_init__(self) -> None:
        check_cp_degrees(self.cp_size, self.cp_ring_degree, self.cp_ulysses_degree)
        self.activation_checkpointing = self._mode_with(self.strategy_config)

    def __setattr__(self, name: str, value: Any) -> None:
        names = [known.name for known in fields(self)]
        if name not in names:
            raise AttributeError(f"MeshContext.{name} cannot be assigned{nearest(name, names)}")
        value = check_context_value(name, value)
        # The last field is there once the constructor is through with all of them.
        if name == "strategy_config" and names[-1] in vars(self):
            mode = self._mode_with(value)
            object.__setattr__(self, "activation_checkpointing", mode)
        object.__setattr__(self, name, value)

    def _mode_with(
        self, strategy_config: DistributedStrategyConfig | None
    ) -> ResolvedActivationCheckpointing:
        """Return the checkpointing mode under this strategy, which must fit the meshes."""
        check_strategy_sizes(strategy_config, self.sizes_by_name())
        if self.device_mesh is not None and dist.is_initialized():
            device_type = self.device_mesh.device_type
            check_offload(strategy_config, device_type, dist.get_backend_config())
        return merge_activation_checkpointing(
            mesh_context=self.activation_checkpointing,
            strategy_config=getattr(strategy_config, "activation_checkpointing", False),
        )

    @classmethod
    def build(
        cls,
        strategy_config: DistributedStrategyConfig,
        parallelism_sizes: ParallelismSizes | None = None,
        moe_parallel_config: MoEParallelizerConfig | None = None,
        activation_checkpointing: ActivationCheckpointingMode = False,
        reapply_trainability: Callable[[nn.Module], None] | None = None,
        cp_ring_degree: int = 1,
        cp_ulysses_degree: int | None = None,
        world_size: int | None = None,
        timeout_minutes: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> "MeshContext":
        """Build the meshes for these sizes and return their context.

        ``world_size`` is the number of processes, None means those that are there; a single process
        without a process group gets one. ``timeout_minutes`` (fractions allowed) holds for every
        axis group, None means the timeout of the default group. ``ranks`` are the global ranks of
        the mesh, in its order, None means all; the others get a context that is no member and need
        not call this at all.

        Raises ValueError or TypeError, the same on every rank and before any collective, when sizes
        do not fit: the message has the whole equation.
        """
        check_strategy("strategy_config", strategy_config)
        sizes = parallelism_sizes or ParallelismSizes()
        if not isinstance(sizes, ParallelismSizes):
            raise TypeError(f"parallelism_sizes={sizes!r} must be ParallelismSizes or None")
        check_timeout_minutes(timeout_minutes, optional=True)
        policies: dict[str, Any] = {
            "strategy_config": strategy_config,
            "moe_parallel_config": moe_parallel_config,
            "activation_checkpointing": activation_checkpointing,
            "reapply_trainability": reapply_trainability,
        }
        cls(**policies)
        check_strategy_sizes(strategy_config, sizes.to_dict())
        check_cp(sizes.cp_size, cp_ring_degree, cp_ulysses_degree)
        members = mesh_members(world_size, ranks)
        axes = sizes.resolve(len(members))
        ensure_process_group(world_size)
        timeout = minutes(timeout_minutes)
        with_moe = axes.ep > 1 or moe_parallel_config is not None
        return cls(
            device_mesh=build_device_mesh(axes, members, timeout),
            moe_mesh=build_moe_mesh(axes, members, timeout) if with_moe else None,
            process_group=local_group(members, timeout),
            cp_ring_degree=cp_ring_degree,
            cp_ulysses_degree=cp_ulysses_degree,
            **policies,
        )

    @classmethod
    def from_meshes(
        cls,
        device_mesh: DeviceMesh | None,
        moe_mesh: DeviceMesh | None = None,
        strategy_config: DistributedStrategyConfig | None = None,
        moe_parallel_config: MoEParallelizerConfig | None = None,
        activation_checkpointing: ActivationCheckpointingMode = False,
        reapply_trainability: Callable[[nn.Module], None] | None = None,
        cp_ring_degree: int = 1,
        cp_ulysses_degree: int | None = None,
    ) -> "MeshContext":
        """Return the context of meshes that exist; their axes are those of the class."""
        return cls(
            device_mesh=device_mesh,
            moe_mesh=moe_mesh,
            strategy_config=strategy_config,
            moe_parallel_config=moe_parallel_config,
            activation_checkpointing=activation_checkpointing,
            reapply_trainability=reapply_trainability,
            cp_ring_degree=cp_ring_degree,
            cp_ulysses_degree=cp_ulysses_degree,
        )

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree."""
        return axis_size(self.device_mesh, Axis.TP, 1)

    @property
    def pp_size(self) -> int:
        """Number of pipeline ranks."""
        return axis_size(self.device_mesh, Axis.PP, 1)

    @property
    def cp_size(self) -> int:
        """Context-parallel degree."""
        return axis_size(self.device_mesh, Axis.CP, 1)

    @property
    def ep_size(self) -> int:
        """Expert-parallel degree, from the moe mesh."""
        return axis_size(self.moe_mesh, Axis.EP, 1)

    @property
    def dp_size(self) -> int | None:
        """Data-parallel degree, replicas times shards; None without a mesh."""
        return None if self.device_mesh is None else self.data_world_size

    @property
    def dp_replicate_size(self) -> int | None:
        """Number of replicas (HSDP); None without a mesh or such an axis."""
        return axis_size(self.device_mesh, Axis.DP_REPLICATE, 0) or None

    @property
    def dp_shard_size(self) -> int:
        """Number of data-parallel shards."""
        return self.data_world_size // (self.dp_replicate_size or 1)

    @property
    def pp_enabled(self) -> bool:
        """Whether there is more than one pipeline rank."""
        return self.pp_size > 1

    @property
    def is_member(self) -> bool:
        """Whether this rank is in the mesh; without a mesh every process is."""
        return self.device_mesh is None or self.device_mesh.get_coordinate() is not None

    @property
    def data_world_size(self) -> int:
        """Number of different shares of the samples: dp_replicate x dp_shard."""
        size = 1
        for axis in self._data_axes():
            size *= axis_size(self.device_mesh, axis, 1)
        return size

    @property
    def data_rank(self) -> int:
        """Which share of the samples this rank reads; peers of tp, cp and pp read the same.

        Raises ValueError on a rank outside the mesh.
        """
        if not self.is_member:
            raise ValueError(
                f"rank {dist.get_rank()} is outside {self.device_mesh}: it has no data"
            )
        rank = 0
        for axis in self._data_axes():
            rank = rank * axis_size(self.device_mesh, axis, 1) + self.axis_rank(axis)
        return rank

    def axis_rank(self, name: str) -> int:
        """Return this rank's coordinate on an axis of the device mesh, 0 where there is none."""
        names = () if self.device_mesh is None else self.device_mesh.mesh_dim_names or ()
        coordinate = None if self.device_mesh is None else self.device_mesh.get_coordinate()
        return coordinate[names.index(name)] if coordinate is not None and name in names else 0

    def parallelize_axis_kwargs(self) -> dict[str, object]:
        """Return the names of the axes in use as arguments of a walk, None where unused."""
        shards = (Axis.EP_REPLICATE, Axis.EP_SHARD)
        names = () if self.moe_mesh is None else self.moe_mesh.mesh_dim_names or ()
        return {
            "dp_axis_names": self._dp_axis_names(),
            "cp_axis_name": str(Axis.CP) if self.cp_size > 1 else None,
            "tp_axis_name": str(Axis.TP) if self.tp_size > 1 else None,
            "ep_axis_name": str(Axis.EP) if self.ep_size > 1 else None,
            "ep_shard_axis_names": tuple(str(n) for n in shards if n in names) or None,
        }

    def pipeline_axis_kwargs(self) -> dict[str, object]:
        """Return ``parallelize_axis_kwargs`` and the name of the pipeline axis."""
        pp = str(Axis.PP) if self.pp_enabled else None
        return {"pp_axis_name": pp, **self.parallelize_axis_kwargs()}

    def sizes_by_name(self) -> dict[str, int | None]:
        """Return the degrees of parallelism under their names in ``ParallelismSizes``."""
        names = ("dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size")
        return {name: getattr(self, name) for name in names}

    def _dp_axis_names(self) -> tuple[str, ...]:
        """Names of the axes that FSDP shards over: with the replicate axis when it is in use."""
        shard = (str(Axis.DP_SHARD_CP),)
        return (str(Axis.DP_REPLICATE), *shard) if (self.dp_replicate_size or 1) > 1 else shard

    def _data_axes(self) -> tuple[str, ...]:
        names = () if self.device_mesh is None else self.device_mesh.mesh_dim_names or ()
        data = (Axis.DP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.DP_SHARD_CP)
        return tuple(axis for axis in names if axis in data)
