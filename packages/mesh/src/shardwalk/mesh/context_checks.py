"""Checks of what a mesh context may hold, by the name of its attribute."""

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh

from shardwalk.mesh.axes import MeshAxisName as Axis
from shardwalk.mesh.checkpointing_modes import normalize_activation_checkpointing
from shardwalk.mesh.config import MoEParallelizerConfig
from shardwalk.mesh.device_meshes import check_cp_degrees
from shardwalk.mesh.strategies import check_strategy
from shardwalk.mesh.validation import check_integer, nearest

__all__ = ["check_context_value", "check_cp"]

_AXES: dict[str, tuple[Axis, ...]] = {
    "device_mesh": (
        *(Axis.PP, Axis.DP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.DP_SHARD_CP, Axis.CP, Axis.TP),
    ),
    "moe_mesh": (Axis.EP_REPLICATE, Axis.EP_SHARD, Axis.EP),
}

# The same ranks or samples would be counted twice.
_OVERLAPS = (
    (Axis.DP, Axis.DP_SHARD),
    (Axis.DP, Axis.DP_SHARD_CP),
    (Axis.DP_SHARD, Axis.DP_SHARD_CP),
    (Axis.DP, Axis.DP_REPLICATE),
    (Axis.DP_SHARD_CP, Axis.CP),
)


def check_context_value(option: str, value: object) -> object:
    """Return what a context holds for ``value``; raise ValueError or TypeError when it may not."""
    return _CHECKS[option](f"MeshContext.{option}", value) if option in _CHECKS else value


def check_cp(cp_size: int, ring: int, ulysses: int | None) -> None:
    """Raise TypeError or ValueError unless ring x Ulysses makes ``cp_size``."""
    _check_degree("cp_ring_degree", ring)
    _check_degree("cp_ulysses_degree", ulysses)
    check_cp_degrees(cp_size, ring, ulysses)


def _check_mesh(option: str, value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, DeviceMesh):
        raise TypeError(f"{option}={value!r} must be a DeviceMesh or None")
    kind = option.rpartition(".")[2]
    names = value.mesh_dim_names or ("without a name",)
    for name in names:
        if name not in _AXES[kind]:
            allowed = [str(axis) for axis in _AXES[kind]]
            raise ValueError(
                f"{option} has the axis {name!r}, {_place_of(name, kind)}; its axes may be "
                f"{', '.join(allowed)}{nearest(name, allowed)}"
            )
    for one, other in _OVERLAPS:
        if one in names and other in names:
            raise ValueError(
                f"{option} has the axes {str(one)!r} and {str(other)!r}, which overlap: give it "
                "dp_replicate, dp_shard and cp, or one axis for them"
            )
    return value


def _place_of(name: str, kind: str) -> str:
    """Say where an axis that a mesh of this kind may not have belongs."""
    for other, axes in _AXES.items():
        if name in axes:
            return f"which belongs to {other}"
    if name == Axis.DP_CP:
        return "which is a flattened view that get_flat_mesh takes of a device_mesh"
    return f"which nothing reads in a {kind}"


def _check_strategy(option: str, value: object) -> object:
    if value is not None:
        check_strategy(option, value)
    return value


def _check_moe_config(option: str, value: object) -> object:
    if not isinstance(value, MoEParallelizerConfig | None):
        raise TypeError(f"{option}={value!r} must be a MoEParallelizerConfig or None")
    return value


def _check_callable(option: str, value: object) -> object:
    if value is not None and not callable(value):
        raise TypeError(f"{option}={value!r} must be a callable or None")
    return value


def _check_mode(option: str, value: object) -> object:
    return normalize_activation_checkpointing(value, option)


def _check_degree(option: str, value: object) -> object:
    check_integer(option, value, optional=option.endswith("cp_ulysses_degree"))
    return value


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "device_mesh": _check_mesh,
    "moe_mesh": _check_mesh,
    "strategy_config": _check_strategy,
    "moe_parallel_config": _check_moe_config,
    "activation_checkpointing": _check_mode,
    "reapply_trainability": _check_callable,
    "cp_ring_degree": _check_degree,
    "cp_ulysses_degree": _check_degree,
}
