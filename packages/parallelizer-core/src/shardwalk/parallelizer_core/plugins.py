"""Entry points: how installed packages add an expert-parallel walk or sidecars."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch import nn

from shardwalk.parallelizer_core.protocols import ExpertParallelProvider, Parallelizer

EXPERT_PARALLEL_GROUP = "shardwalk.expert_parallel"
SIDECAR_GROUP = "shardwalk.sidecars"


class MissingExpertParallelError(ImportError, ValueError):
    """Expert parallelism was asked for, and no installed package provides its walk."""


def expert_parallel_provider() -> ExpertParallelProvider:
    """Load the one installed expert-parallel walk.

    Raises:
        MissingExpertParallelError: no package provides one; the message says what to install.
        ValueError: more than one does; the message names them all.
    """
    found = list(entry_points(group=EXPERT_PARALLEL_GROUP))
    if not found:
        raise MissingExpertParallelError(
            f"ep_size > 1 or a moe_parallel_config needs an expert-parallel walk, and no installed "
            f"package provides one (entry-point group {EXPERT_PARALLEL_GROUP!r}); install "
            f"shardwalk-moe-ep, or set "
            f"ep_size=1 and leave moe_parallel_config unset"
        )
    if len(found) > 1:
        names = ", ".join(sorted(_label(point) for point in found))
        raise ValueError(
            f"{len(found)} packages provide an expert-parallel walk: {names}; uninstall all but one"
        )
    provider: ExpertParallelProvider = _load(found[0])
    return provider


def installed_sidecar(cls: type[nn.Module]) -> Parallelizer | None:
    """The sidecar an installed package registered for exactly this class, or None.

    Entry points of the group `shardwalk.sidecars` are keyed by the class's module and qualified
    name.

    Raises:
        ValueError: two packages registered a sidecar for the same class, or one names what it
            does not hold.
    """
    points = _sidecar_points().get(f"{cls.__module__}.{cls.__qualname__}", ())
    if len(points) > 1:
        names = ", ".join(sorted(_label(point) for point in points))
        raise ValueError(
            f"{len(points)} sidecars are installed for {cls.__qualname__}: {names}; keep one"
        )
    return _load(points[0]) if points else None


@cache
def _sidecar_points() -> dict[str, tuple[EntryPoint, ...]]:
    points: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=SIDECAR_GROUP):
        points[point.name] = (*points.get(point.name, ()), point)
    return points


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (AttributeError, ModuleNotFoundError) as error:
        raise ValueError(
            f"the entry point {point.name!r} of group {point.group!r} by {_label(point)} cannot be "
            f"loaded: {error}; mend or uninstall that package"
        ) from error


def _label(point: EntryPoint) -> str:
    return f"{point.dist.name} ({point.value})" if point.dist is not None else point.value
