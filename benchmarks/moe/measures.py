"""What each rank measures of each side: numbers, peak memory, exchanges, times of steps in turn."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: PLC2701

from shardwalk.parallelizer_core.testing.collectives import CountCollectives

from .sides import SIDES, Side, Variant

_WARM_UP = 2
_TRACKED = 3


@dataclass(frozen=True, kw_only=True)
class SideReport:
    """One side on one rank.

    Attributes:
        error: largest difference of its result and gradients from ours, in units of the largest.
        peak_bytes: peak memory of one step, weights and batch included.
        exchanged_bytes: that this rank gave to all-to-alls in one step.
        seconds: wall time of each timed step.
        cpu_seconds: CPU time of all threads of this rank in each timed step.
    """

    error: float
    peak_bytes: int
    exchanged_bytes: int
    seconds: list[float]
    cpu_seconds: list[float]


def measure(variant: Variant, steps: int) -> dict[str, SideReport]:
    """Compare all sides; `steps` 0 leaves the timing out."""
    sides = {name: Side(variant, make) for name, make in SIDES.items()}
    for side in sides.values():
        for _ in range(_WARM_UP):
            side.step()
    times = _interleaved(sides, steps)
    reference = [each.clone() for each in sides["ours"].numbers()]
    return {
        name: SideReport(
            error=_error(side.numbers(), reference),
            exchanged_bytes=_exchanged_bytes(side),
            peak_bytes=_peak_bytes(side),
            seconds=[wall for wall, _ in times[name]],
            cpu_seconds=[cpu for _, cpu in times[name]],
        )
        for name, side in sides.items()
    }


def _error(numbers: list[Tensor], reference: list[Tensor]) -> float:
    pairs = zip(numbers, reference, strict=True)
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


def _exchanged_bytes(side: Side) -> int:
    with CountCollectives() as counted:
        side.step()
    return sum(counted.bytes.values())


def _peak_bytes(side: Side) -> int:
    """The least of a few steps: gloo's threads let go of a buffer some time after its use."""
    gc.collect()
    tracker = MemTracker()
    tracker.track_external(side.module, *side.batch, side.upstream)
    return min(_tracked_peak(tracker, side) for _ in range(_TRACKED))


def _tracked_peak(tracker: MemTracker, side: Side) -> int:
    with tracker:
        side.step()
    peak: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    tracker.reset_mod_stats()
    return peak


def _interleaved(sides: dict[str, Side], steps: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of steps of all sides in turn, in another order each round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    orders = random.Random(0)  # the same on every rank
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            for name in orders.sample(list(sides), len(sides)):
                times[name].append(_timed(sides[name]))
    finally:
        gc.enable()
    return times


def _timed(side: Side) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    side.step()
    dist.barrier()
    return time.perf_counter() - wall, time.process_time() - cpu
