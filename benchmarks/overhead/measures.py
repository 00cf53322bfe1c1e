"""What each rank measures: collectives, peak memory, and the times of interleaved steps."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker  # noqa: PLC2701

from shardwalk.parallelizer_core.testing.collectives import CountCollectives

from .sides import Trainer, Variant, by_hand, by_hand_in_root, walked

REDUCE = "_reduce_scatter_base_"
_WARM_UP = 3
_TRACKED = 4


class LargestCollectives(CountCollectives):
    """Also keeps the largest input of one call, in bytes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: Counter[str] = Counter()

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        """Carry the call out and see by how much the bytes grew."""
        before = Counter(self.bytes)
        result = super().__torch_dispatch__(*args, **kwargs)
        for name, size in (self.bytes - before).items():
            self.largest[name] = max(self.largest[name], size)
        return result


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The collectives of one step, by name: calls, bytes sent, bytes of the largest call."""

    calls: dict[str, int]
    bytes: dict[str, int]
    largest: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class SideReport:
    """One side on one rank.

    Attributes:
        traffic: of one step.
        peak_bytes: peak memory of one step.
        seconds: wall time of each timed step.
        cpu_seconds: CPU time of all threads of this rank in each timed step.
        loss: after the last of them.
    """

    traffic: Traffic
    peak_bytes: int
    seconds: list[float]
    cpu_seconds: list[float]
    loss: float


def traffic_of(trainer: Trainer) -> Traffic:
    """The collectives of the next step."""
    with LargestCollectives() as counted:
        trainer.step()
    return Traffic(
        calls=dict(counted.calls), bytes=dict(counted.bytes), largest=dict(counted.largest)
    )


def peak_bytes_of(trainer: Trainer) -> int:
    """The peak memory of a step by torch's tracker: weights, optimizer and all.

    The least of a few steps: gloo's threads let go of a buffer some time after its collective.
    """
    gc.collect()
    tracker = FSDPMemTracker(trainer.model, trainer.optimizer)
    tracker.track_inputs(tuple(trainer.batch.values()))
    return min(_tracked_peak(tracker, trainer) for _ in range(_TRACKED))


def _tracked_peak(tracker: FSDPMemTracker, trainer: Trainer) -> int:
    with tracker:
        trainer.step()
    peak: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    tracker.reset_mod_stats()
    return peak


def measure(variant: Variant, steps: int) -> dict[str, SideReport]:
    """Compare the walked model with the script; `steps` 0 leaves the timing out."""
    return _measure(variant, {"walked": walked, "by_hand": by_hand}, steps)


def measure_tables(variant: Variant) -> dict[str, SideReport]:
    """Compare both with a script that leaves the tables to the root unit, untimed."""
    sides = {"walked": walked, "by_hand": by_hand, "tables_in_root": by_hand_in_root}
    return _measure(variant, sides, steps=0)


def _measure(
    variant: Variant, sides: Mapping[str, Callable[[Variant], nn.Module]], steps: int
) -> dict[str, SideReport]:
    trainers = {name: Trainer(variant, shard) for name, shard in sides.items()}
    for trainer in trainers.values():
        for _ in range(_WARM_UP):
            trainer.step()
    traffic = {name: traffic_of(trainer) for name, trainer in trainers.items()}
    times = _interleaved(trainers, steps)
    losses = {name: trainer.step().item() for name, trainer in trainers.items()}
    return {
        name: SideReport(
            traffic=traffic[name],
            peak_bytes=peak_bytes_of(trainer),  # the last of all: it replaces torch's hooks
            seconds=[wall for wall, _ in times[name]],
            cpu_seconds=[cpu for _, cpu in times[name]],
            loss=losses[name],
        )
        for name, trainer in trainers.items()
    }


def _interleaved(trainers: dict[str, Trainer], steps: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of steps of all sides in turn; every other round goes backwards."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    gc.collect()
    gc.disable()
    try:
        for index in range(steps):
            for name in list(trainers)[:: 1 if index % 2 else -1]:
                times[name].append(_timed(trainers[name]))
    finally:
        gc.enable()
    return times


def _timed(trainer: Trainer) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.step()
    dist.barrier()
    return time.perf_counter() - wall, time.process_time() - cpu
