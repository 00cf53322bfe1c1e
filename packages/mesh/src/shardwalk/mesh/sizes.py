"""What parallelism was asked for, and the sizes of every axis that come of it."""

import logging
from dataclasses import asdict, dataclass
from math import prod

from shardwalk.mesh.validation import check_integer

__all__ = ["AxisSizes", "ParallelismSizes"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """Sizes of all axes of one mesh.

    The mesh has ``pp x dp_replicate x dp_shard x cp x tp`` ranks; each pipeline stage has
    ``ep_replicate x ep_shard x ep`` of them.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    ep_replicate: int
    ep_shard: int

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return self.pp * self.stage_size

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp


@dataclass(frozen=True, kw_only=True)
class ParallelismSizes:
    """The degrees of parallelism that the user asks for.

    ``dp_size`` None means whatever fills the world. ``dp_replicate_size`` is the part of
    ``dp_size`` that holds copies (HSDP); the rest shards. ``ep_size`` divides the ranks of one
    pipeline stage and does not enlarge the world.

    Raises TypeError for sizes that are no integers, ValueError for those below one and for a
    ``dp_replicate_size`` that does not divide ``dp_size``.
    """

    dp_size: int | None = None
    dp_replicate_size: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            check_integer(name, value, optional=name.startswith("dp_"))
        if self.dp_size is not None and self.dp_size % self.replicas:
            raise ValueError(
                f"dp_replicate_size={self.replicas} does not divide dp_size={self.dp_size}: "
                f"dp {self.dp_size} = dp_replicate {self.replicas} x dp_shard ?"
            )

    def to_dict(self) -> dict[str, int | None]:
        """Return the sizes by name, fit for the constructor."""
        return asdict(self)

    @property
    def replicas(self) -> int:
        """``dp_replicate_size``, with None as one."""
        return 1 if self.dp_replicate_size is None else self.dp_replicate_size

    def equation(self, world_size: int) -> str:
        """Return the whole equation, such as ``world_size 8 = pp 1 x dp ? x cp 1 x tp 3``."""
        dp = "?" if self.dp_size is None else self.dp_size
        replicas = "" if self.replicas == 1 else f" (dp_replicate {self.replicas} x dp_shard ?)"
        return (
            f"world_size {world_size} = pp {self.pp_size} x dp {dp}{replicas} "
            f"x cp {self.cp_size} x tp {self.tp_size}"
        )

    def resolve(self, world_size: int) -> AxisSizes:
        """Return the size of every axis in a world of ``world_size`` ranks.

        Raises ValueError with the whole equation when the sizes don't fit.
        """
        check_integer("world_size", world_size)
        dp = self._resolve_dp(world_size)
        dp_shard = dp // self.replicas
        ep_replicate = self._resolve_ep_replicate(world_size, dp, dp_shard)
        stage_size = dp * self.cp_size * self.tp_size
        return AxisSizes(
            pp=self.pp_size,
            dp_replicate=self.replicas,
            dp_shard=dp_shard,
            cp=self.cp_size,
            tp=self.tp_size,
            ep=self.ep_size,
            ep_replicate=ep_replicate,
            ep_shard=stage_size // (ep_replicate * self.ep_size),
        )

    def _resolve_dp(self, world_size: int) -> int:
        others = prod((self.pp_size, self.cp_size, self.tp_size))
        equation = self.equation(world_size)
        if world_size % others:
            raise ValueError(
                f"{equation} has no solution: pp x cp x tp = {others} does not divide {world_size}"
            )
        dp = world_size // others
        if self.dp_size not in (None, dp):
            raise ValueError(
                f"{equation} does not hold: use dp_size={dp}, or leave dp_size out to infer it"
            )
        if dp % self.replicas:
            raise ValueError(
                f"{equation} has no solution: "
                f"dp_replicate_size={self.replicas} does not divide dp {dp}"
            )
        return dp

    def _resolve_ep_replicate(self, world_size: int, dp: int, dp_shard: int) -> int:
        """Keep the ranks of an expert group inside one replica wherever ``ep_size`` allows."""
        replica_size = dp_shard * self.cp_size * self.tp_size
        stage_size = dp * self.cp_size * self.tp_size
        if stage_size % self.ep_size:
            raise ValueError(
                f"ep_size={self.ep_size} does not divide the {stage_size} ranks of a stage: "
                f"dp {dp} x cp {self.cp_size} x tp {self.tp_size} = ep_shard ? x ep {self.ep_size} "
                f"({self.equation(world_size)})"
            )
        if replica_size % self.ep_size == 0:
            return self.replicas
        logger.info(
            "ep_size=%d does not divide the %d ranks of a replica: experts are spread over "
            "replicas, so their gathers cross them",
            self.ep_size,
            replica_size,
        )
        return 1
