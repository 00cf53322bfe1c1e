"""Which strategy is meant, and which axes it can work with."""

from collections.abc import Mapping

from shardwalk.mesh.config import (
    DDPConfig,
    DistributedStrategyConfig,
    FSDP2Config,
    MegatronFSDPConfig,
)
from shardwalk.mesh.validation import nearest

__all__ = ["check_offload", "check_strategy", "check_strategy_sizes", "resolve_strategy"]

_BY_NAME: dict[str, type[DistributedStrategyConfig]] = {
    "fsdp2": FSDP2Config,
    "ddp": DDPConfig,
    "megatron_fsdp": MegatronFSDPConfig,
    "mfsdp": MegatronFSDPConfig,
}

_REFUSED = {
    DDPConfig: ("tp_size", "pp_size", "cp_size", "ep_size", "dp_replicate_size"),
    MegatronFSDPConfig: ("pp_size", "ep_size", "dp_replicate_size"),
}


def resolve_strategy(value: str | DistributedStrategyConfig) -> DistributedStrategyConfig:
    """Return the strategy, or the default config of the named one (dashes count as underscores)."""
    if isinstance(value, str):
        name = value.strip().lower().replace("-", "_")
        if name not in _BY_NAME:
            listed = ", ".join(map(repr, _BY_NAME))
            hint = nearest(name, ("fsdp2", "ddp", "megatron_fsdp"))
            raise ValueError(f"strategy={value!r} must be one of {listed}{hint}")
        return _BY_NAME[name]()
    check_strategy("strategy", value)
    return value


def check_strategy(option: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a strategy config."""
    if not isinstance(value, DistributedStrategyConfig):
        raise TypeError(
            f"{option}={value!r} must be a FSDP2Config, DDPConfig or MegatronFSDPConfig"
            + ("; DistributedSetup.build takes names too" if isinstance(value, str) else "")
        )


def check_strategy_sizes(
    strategy: DistributedStrategyConfig | None, sizes: Mapping[str, int | None]
) -> None:
    """Raise ValueError for the first size above one that the strategy cannot work with."""
    for cls, refused in _REFUSED.items():
        if isinstance(strategy, cls):
            for name in refused:
                if (size := sizes.get(name)) is not None and size > 1:
                    _refuse(cls, name, size)


def check_offload(
    strategy: DistributedStrategyConfig | None, device_type: str, backends: str
) -> None:
    """Raise ValueError when parameters are offloaded where CPU tensors have no backend.

    ``backends`` is what torch lists for a group, such as ``cpu:gloo,cuda:nccl``.
    """
    offloads = getattr(strategy, "offload_policy", None) is not None
    if offloads and device_type != "cpu" and "cpu:" not in backends:
        raise ValueError(
            "FSDP2Config.offload_policy needs a process group with a CPU backend, but this one has "
            f"{backends!r}: start it with initialize_distributed, or as 'cpu:gloo,cuda:nccl'"
        )


def _refuse(cls: type, name: str, size: int) -> None:
    able = ["FSDP2Config"]
    if name not in _REFUSED[MegatronFSDPConfig]:
        able.append("MegatronFSDPConfig")
    raise ValueError(
        f"{name}={size} is not supported by {cls.__name__}: "
        f"use {' or '.join(able)}, or leave {name} out"
    )
