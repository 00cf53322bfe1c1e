"""Topology and policies of a run in one object, from forgiving arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwalk.mesh.checkpointing_modes import (
    ActivationCheckpointingMode,
    merge_activation_checkpointing,
)
from shardwalk.mesh.config import DistributedStrategyConfig, MoEParallelizerConfig
from shardwalk.mesh.context import MeshContext
from shardwalk.mesh.pipeline_config import PipelineConfig
from shardwalk.mesh.sizes import ParallelismSizes
from shardwalk.mesh.strategies import check_strategy_sizes, resolve_strategy
from shardwalk.mesh.validation import config_from_mapping

__all__ = ["DistributedSetup"]


@dataclass(frozen=True, eq=False)
class DistributedSetup:
    """A mesh context with the policies it was built from.

    The strategy, the MoE config and the checkpointing mode are those of ``mesh_context``: what is
    left out here is taken from there. With something that is given only here ``mesh_context``
    becomes a copy which has it, over the same meshes; the context that was given stays as it is.
    Raises ValueError when both are given and differ, and for a ``pipeline_config`` without pipeline
    ranks.
    """

    mesh_context: MeshContext
    strategy_config: DistributedStrategyConfig | None = None
    pipeline_config: PipelineConfig | None = None
    moe_parallel_config: MoEParallelizerConfig | None = None
    activation_checkpointing: ActivationCheckpointingMode = False

    def __post_init__(self) -> None:
        context = self.mesh_context
        if not isinstance(context, MeshContext):
            raise TypeError(f"DistributedSetup.mesh_context={context!r} must be a MeshContext")
        if not isinstance(self.pipeline_config, PipelineConfig | None):
            raise TypeError(
                f"DistributedSetup.pipeline_config={self.pipeline_config!r} must be a "
                "PipelineConfig or None; DistributedSetup.build takes dicts too"
            )
        mode = merge_activation_checkpointing(
            setup=self.activation_checkpointing,
            mesh_context=context.activation_checkpointing,
            strategy_config=getattr(self.strategy_config, "activation_checkpointing", False),
        )
        agreed = {
            name: _agreed(name, getattr(self, name), getattr(context, name))
            for name in ("strategy_config", "moe_parallel_config")
        }
        _check_pipeline(self.pipeline_config, context.pp_size)
        check_strategy_sizes(agreed["strategy_config"], context.sizes_by_name())
        values = {**agreed, "activation_checkpointing": mode}
        if any(value != getattr(context, name) for name, value in values.items()):
            object.__setattr__(self, "mesh_context", replace(context, **values))
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def build(
        cls,
        strategy: str | DistributedStrategyConfig = "fsdp2",
        parallelism_sizes: ParallelismSizes | None = None,
        pipeline_config: PipelineConfig | dict[str, Any] | None = None,
        moe_parallel_config: MoEParallelizerConfig | dict[str, Any] | None = None,
        activation_checkpointing: ActivationCheckpointingMode = False,
        world_size: int | None = None,
        timeout_minutes: float | None = None,
        ranks: list[int] | tuple[int, ...] | None = None,
    ) -> "DistributedSetup":
        """Build the meshes and return them with the policies.

        ``strategy`` is a config or "fsdp2", "ddp", "megatron_fsdp" ("mfsdp"); sizes and configs may
        be dicts of their options. The rest is as in ``MeshContext.build``.
        """
        strategy_config = resolve_strategy(strategy)
        sizes = _optional(ParallelismSizes, parallelism_sizes, "parallelism_sizes")
        pipeline = _optional(PipelineConfig, pipeline_config, "pipeline_config")
        moe = _optional(MoEParallelizerConfig, moe_parallel_config, "moe_parallel_config")
        _check_pipeline(pipeline, 1 if sizes is None else sizes.pp_size)
        context = MeshContext.build(
            strategy_config,
            parallelism_sizes=sizes,
            moe_parallel_config=moe,
            activation_checkpointing=activation_checkpointing,
            world_size=world_size,
            timeout_minutes=timeout_minutes,
            ranks=ranks,
        )
        return cls(mesh_context=context, pipeline_config=pipeline)


def _check_pipeline(pipeline_config: PipelineConfig | None, pp_size: int) -> None:
    if pipeline_config is not None and pp_size == 1:
        raise ValueError(
            f"pipeline_config={pipeline_config!r} needs pipeline ranks, but pp_size is 1: "
            "use pp_size > 1, or leave pipeline_config out"
        )


def _agreed(name: str, own: Any, context: Any) -> Any:
    if own is not None and context is not None and own != context:
        raise ValueError(
            f"DistributedSetup.{name}={own!r} differs from that of mesh_context: {context!r}"
        )
    return own if context is None else context


def _optional(cls: type, value: Any, option: str) -> Any:
    if value is None or isinstance(value, cls | Mapping):
        return None if value is None else config_from_mapping(cls, value, option)
    raise TypeError(f"{option}={value!r} must be a {cls.__name__}, a dict of its options or None")
