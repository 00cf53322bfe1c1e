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
from torch.distributed.fsdp import FSDPModule

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
        held_bytes: memory before a step: weights, optimizer and batch.
        peak_bytes: peak memory of one step, what was held before it included.
        seconds: wall time of each timed step.
        cpu_seconds: CPU time of all threads of this rank in each timed step.
        loss: after the last of them.
    """

    traffic: Traffic
    held_bytes: int
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


def memory_of(trainer: Trainer) -> tuple[int, int]:
    """The memory before a step and at its peak by torch's tracker: weights, optimizer and all.

    The least of a few steps: gloo's threads let go of a buffer some time after its collective.
    """
    gc.collect()
    root = next(each for each in trainer.model.modules() if isinstance(each, FSDPModule))
    tracker = FSDPMemTracker(root, trainer.optimizer)
    tracker.track_inputs(tuple(trainer.batch.values()))
    held, peaks = zip(*(_tracked(tracker, trainer) for _ in range(_TRACKED)), strict=True)
    return min(held), min(peaks)


def _tracked(tracker: FSDPMemTracker, trainer: Trainer) -> tuple[int, int]:
    with tracker:
        held = _total(tracker, "current")
        trainer.step()
    peak = _total(tracker, "peak")
    tracker.reset_mod_stats()
    return held, peak


def _total(tracker: FSDPMemTracker, when: str) -> int:
    total: int = tracker.get_tracker_snapshot(when)[torch.device("cpu")]["Total"]
    return total


def measure(variant: Variant, steps: int) -> dict[str, SideReport]:
    """Compare the walked model with the script; `steps` 0 leaves the timing out."""
    return compare(variant, {"walked": walked, "by_hand": by_hand}, steps)


def measure_tables(variant: Variant) -> dict[str, SideReport]:
    """Compare both with a script that leaves the tables to the root unit, untimed."""
    sides = {"walked": walked, "by_hand": by_hand, "tables_in_root": by_hand_in_root}
    return compare(variant, sides, steps=0)


def compare(
    variant: Variant, sides: Mapping[str, Callable[[Variant], nn.Module]], steps: int
) -> dict[str, SideReport]:
    """Measure every side: what a step communicates, takes and holds; `steps` are timed in turn."""
    trainers = {name: Trainer(variant, shard) for name, shard in sides.items()}
    for trainer in trainers.values():
        for _ in range(_WARM_UP):
            trainer.step()
    traffic = {name: traffic_of(trainer) for name, trainer in trainers.items()}
    times = _interleaved(trainers, steps)
    losses = {name: trainer.step().item() for name, trainer in trainers.items()}
    # The last of all: it replaces torch's hooks.
    memory = {name: memory_of(trainer) for name, trainer in trainers.items()}
    return {
        name: SideReport(
            traffic=traffic[name],
            held_bytes=memory[name][0],
            peak_bytes=memory[name][1],
            seconds=[wall for wall, _ in times[name]],
            cpu_seconds=[cpu for _, cpu in times[name]],
            loss=losses[name],
        )
        for name in trainers
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
