"""The small protocols through which a model tells the walk what core itself does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import nn

from shardwalk.mesh import MeshContext


class Parallelizer(Protocol):
    """What a sidecar must offer: one call that parallelizes a model in place."""

    def parallelize(self, model: nn.Module, mesh_context: MeshContext, /) -> nn.Module:
        """Apply every parallelism `mesh_context` asks for and return the model to train."""
        ...


@runtime_checkable
class FinalizesParallelization(Protocol):
    """A module that has something to do once its model is parallelized, on every mesh.

    `parallelize_model` calls it once per module after the sidecar returned; it must be idempotent,
    since a sidecar may have called it already.
    """

    def finalize_parallelization(self, mesh_context: MeshContext) -> None:
        """Bring what this module owns (a replicated bias, a cache) in line with the mesh."""
        ...


ExpertParallelProvider = Callable[[nn.Module, MeshContext, Parallelizer], nn.Module]
"""The walk that a package registers under the entry point `shardwalk.expert_parallel`."""
