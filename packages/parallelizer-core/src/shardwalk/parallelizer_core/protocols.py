"""The small protocols through which a model tells the walk what core itself does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

from shardwalk.mesh import MeshContext
from shardwalk.parallelizer_core.recompute_replay import ContextPair
from shardwalk.parallelizer_core.selective_checkpointing import SaveRule


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


class HasCheckpointContext(Protocol):
    """A block, or a module in it, that wants contexts around each checkpointed call and recompute.

    Class or instance attribute. It is called once per checkpointed call, and core enters the pair
    around its own without knowing what for; `replay_contexts` is one. The second context is entered
    anew for each recompute, in whatever thread the backward runs in.
    """

    def checkpoint_context(self) -> ContextPair:
        """The contexts of one call: around its forward and around its recomputes."""
        ...


class HasOpsToSave(Protocol):
    """A block, or a module in it, that has more outputs kept under selective checkpointing."""

    def ops_to_save(self) -> Mapping[Any, SaveRule]:
        """By operator overload, a rule that is called with the arguments of each of its calls."""
        ...
