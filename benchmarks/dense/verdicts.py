"""From the reports of all ranks to tables and bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from overhead.measures import SideReport
from overhead.sides import Checkpointing, Variant
from overhead.verdicts import Reports, time_figures

from .by_hand import (
    peak_of_activations,
    peak_of_training,
    products_of_step,
    traffic_of_split_layers,
    units_of,
)
from .sides import LlamaVariant

MEMORY_BOUND = 0.05  # of the count by hand
# Of the time without a recompute: of "full", whose elementwise work comes on top of the products;
# of "selective", which runs Python at every operator of a block, for the narrow blocks here.
RECOMPUTE_BOUNDS = {"full": 1.6, "selective": 2.0}
PREFETCH_BOUND = 1.1
MODES: dict[str, Checkpointing] = {"off": False, "selective": "selective", "full": "full"}
TIMES = ("step ms", "time / off", "CPU time / off")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A table with its title, and whether each bound is kept.

    `note` says what the table does not show.
    """

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    checks: dict[str, bool]
    note: str = ""


def checkpointing_part(sizes: Variant, reports: Reports) -> Part:
    """Peak activations of each mode beside the count by hand, and what the recompute takes."""
    peaks = {mode: _above(reports, mode) for mode in MODES}
    by_hand = {name: peak_of_activations(sizes, mode) for name, mode in MODES.items()}
    checks = {
        "activations of full < selective < off": peaks["full"] < peaks["selective"] < peaks["off"],
        f"activations within {MEMORY_BOUND:.0%} of the count by hand": all(
            _near(peaks[name], by_hand[name]) for name in MODES
        ),
        "same loss": _same_loss(reports),
    }
    rows = []
    for name, mode in MODES.items():
        times, cpu = _times(reports, name)
        if cpu and name in RECOMPUTE_BOUNDS:
            bound = RECOMPUTE_BOUNDS[name]
            checks[f"CPU time of {name} surely below {bound} of off"] = cpu[1] < bound
        products = f"{products_of_step(sizes, mode):.2f}"
        rows.append((name, _mb(peaks[name]), _mb(by_hand[name]), products, *times))
    return Part(
        title=f"Activation checkpointing, {len(reports)} ranks FSDP2, peak above what was held",
        headings=("recompute", "peak MB", "by hand", "products", *TIMES),
        rows=rows,
        checks=checks,
        note="products: matrix products of a step by hand, over those of off; selective runs "
        "Python at every operator beside them, which narrow blocks feel",
    )


def traffic_part(variants: Sequence[LlamaVariant], reports: Sequence[Reports]) -> Part:
    """What a rank gives to collectives, counted and by hand, for whole and split sequences."""
    rows, checks = [], {}
    for sizes, of_ranks in zip(variants, reports, strict=True):
        sequences = "split" if sizes.sequence_parallel else "whole"
        by_hand = traffic_of_split_layers(sizes)
        counted = [_traffic(report["walked"]) for report in of_ranks]
        for name in sorted(by_hand | counted[0]):
            found, expected = (each.get(name, (0, 0)) for each in (counted[0], by_hand))
            rows.append((sequences, name, *map(str, found), *map(str, expected)))
        whole = [f"{sum(size for _, size in each.values())}" for each in (counted[0], by_hand)]
        rows.append((sequences, "together", "", whole[0], "", whole[1]))
        key = f"{sequences} sequences: calls and bytes of every rank equal the count by hand"
        checks[key] = all(each == by_hand for each in counted)
    headings = ("sequence", "collective", "calls", "bytes", "by hand: calls", "bytes")
    title = f"TP 2 x FSDP2 2 on {len(reports[0])} ranks, what a rank sends in a step"
    return Part(title=title, headings=headings, rows=rows, checks=checks)


def adapters_part(sizes: LlamaVariant, reports: Sequence[Reports], rank: int) -> Part:
    """The memory of a training step of all weights, and of adapters on frozen ones."""
    sides = {"all weights": replace(sizes, rank=0), f"LoRA {rank}": replace(sizes, rank=rank)}
    rows, peaks, near = [], [], []
    for (name, each), of_ranks in zip(sides.items(), reports, strict=True):
        units = units_of(each)
        held = max(report["walked"].held_bytes for report in of_ranks)
        peaks.append(max(report["walked"].peak_bytes for report in of_ranks))
        by_hand = peak_of_training(each)
        near.append(_near(peaks[-1], by_hand))
        trained = units.all_adapters if each.rank else units.all
        shards = [size * trained // each.world_size for size in (4, 8)]  # gradients, moments
        weights = 4 * units.all // each.world_size
        sizes_of_row = (weights, *shards, held, peaks[-1], by_hand)
        rows.append((name, f"{trained:,}", *map(_mb, sizes_of_row)))
    checks = {
        "peak of LoRA less than of all weights": peaks[1] < peaks[0],
        f"peaks within {MEMORY_BOUND:.0%} of the count by hand": all(near),
    }
    return Part(
        title=f"AdamW on {len(reports[0])} ranks FSDP2, MB per rank",
        headings=(
            *("training", "trained", "weights", "gradients", "moments"),
            *("held", "peak", "by hand"),
        ),
        rows=rows,
        checks=checks,
        note="weights, gradients, moments: shards by hand; held, peak: measured between steps and "
        "in one; by hand: the peak, with gathered units",
    )


def prefetch_part(reports: Reports) -> Part:
    """The same collectives with explicit prefetch, and its ratio of times."""
    checks = {
        "same collectives": all(each["on"].traffic == each["off"].traffic for each in reports),
        "same loss": _same_loss(reports),
    }
    rows = []
    for name in ("off", "on"):
        traffic = reports[0][name].traffic
        counts = (str(sum(traffic.calls.values())), _mb(sum(traffic.bytes.values())))
        peak = _mb(max(report[name].peak_bytes for report in reports))
        times, cpu = _times(reports, name)
        if cpu and name == "on":
            checks[f"CPU time not surely above {PREFETCH_BOUND} of off"] = cpu[0] <= PREFETCH_BOUND
        rows.append((name, *counts, peak, *times))
    return Part(
        title=f"Explicit prefetch, {len(reports)} ranks FSDP2",
        headings=("prefetch", "collectives", "MB sent", "peak MB", *TIMES),
        rows=rows,
        checks=checks,
        note="Gloo computes on the cores that the model needs, so little can overlap here: the "
        "ratio says what prefetch costs on a CPU, not what it saves on a GPU",
    )


def _times(reports: Reports, side: str) -> tuple[list[str], tuple[float, float] | None]:
    """The cells of `TIMES`, and the interval of the ratio of CPU times; None if untimed."""
    if not reports[0][side].seconds:
        return [""] * len(TIMES), None
    figures = time_figures(reports, side, "off")
    cells = [f"{figures['step_ms'][side]:.0f}"]
    for key in ("time_ratio", "cpu_ratio"):
        low, high = figures[f"{key}_95"]
        cells.append("" if side == "off" else f"{figures[key]:.2f} [{low:.2f}, {high:.2f}]")
    return cells, (low, high)


def _above(reports: Reports, side: str) -> int:
    return max(report[side].peak_bytes - report[side].held_bytes for report in reports)


def _near(found: int, expected: int) -> bool:
    return abs(found - expected) <= MEMORY_BOUND * expected


def _same_loss(reports: Reports) -> bool:
    return all(len({side.loss for side in report.values()}) == 1 for report in reports)


def _traffic(side: SideReport) -> dict[str, tuple[int, int]]:
    return {name: (calls, side.traffic.bytes[name]) for name, calls in side.traffic.calls.items()}


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
