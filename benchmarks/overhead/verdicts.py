"""From the reports of all ranks to one line of JSON, and whether it keeps the bounds."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .measures import REDUCE, SideReport
from .sides import Variant

PEAK_BOUND = 1.02
TIME_BOUND = 1.10

Reports = Sequence[dict[str, SideReport]]


def overhead_line(name: str, reports: Reports) -> dict[str, Any]:
    """Walked over by hand: the same traffic and loss, the ratios of peak memory and time."""
    ours, theirs = reports[0]["walked"], reports[0]["by_hand"]
    peaks = [report["walked"].peak_bytes / report["by_hand"].peak_bytes for report in reports]
    line: dict[str, Any] = {
        "variant": name,
        "ranks": len(reports),
        "calls": ours.traffic.calls,
        "bytes": ours.traffic.bytes,
        "peak_bytes": ours.peak_bytes,
        "peak_ratio": round(max(peaks), 4),
    }
    checks = {
        "same collectives": all(
            report["walked"].traffic == report["by_hand"].traffic for report in reports
        ),
        "same loss": ours.loss == theirs.loss,
        f"peak ratio at most {PEAK_BOUND}": max(peaks) <= PEAK_BOUND,
    }
    if ours.seconds:
        line |= time_figures(reports, "walked", "by_hand")
        checks[f"time ratio surely below {TIME_BOUND}"] = line["time_ratio_95"][1] < TIME_BOUND
    return line | {"checks": checks}


def time_figures(reports: Reports, one: str, other: str) -> dict[str, Any]:
    """Median step of two sides, and ratios of one over the other in paired steps.

    Wall time is that of the slowest rank, CPU time that of all. The latter hardly depends on
    what else the machine does. The intervals of the medians are made of order statistics, so that
    nothing is assumed of the noise.
    """
    sides = (one, other)
    wall = [_join(max, [report[side].seconds for report in reports]) for side in sides]
    cpu = [_join(sum, [report[side].cpu_seconds for report in reports]) for side in sides]
    steps = {side: statistics.median(each) for side, each in zip(sides, wall, strict=True)}
    figures: dict[str, Any] = {"step_ms": {k: round(1000 * v, 1) for k, v in steps.items()}}
    for key, (ours, theirs) in (("time_ratio", wall), ("cpu_ratio", cpu)):
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        figures[key] = round(statistics.median(ratios), 4)
        figures[f"{key}_95"] = [round(end, 4) for end in median_interval(ratios)]
    return figures


def _join(
    how: Callable[[Sequence[float]], float], times_of_ranks: Sequence[Sequence[float]]
) -> list[float]:
    return [how(times) for times in zip(*times_of_ranks, strict=True)]


def tables_line(name: str, variant: Variant, reports: Reports) -> dict[str, Any]:
    """What a unit for each table saves: the largest reduce buffer and the peak of a step."""
    buffers = {side: report.traffic.largest[REDUCE] for side, report in reports[0].items()}
    peaks = {side: max(report[side].peak_bytes for report in reports) for side in buffers}
    # Gradients are reduced in fp32, each table padded to equal shards.
    shards = variant.world_size // variant.replicas
    table = math.ceil(variant.vocabulary / shards) * shards * variant.dim * 4
    checks = {
        "largest reduce buffer at most the larger table": buffers["walked"] <= table,
        "both tables in one buffer without own units": buffers["tables_in_root"] >= 2 * table,
        "lower peak than without": peaks["walked"] < peaks["tables_in_root"],
        f"peak ratio at most {PEAK_BOUND}": peaks["walked"] <= PEAK_BOUND * peaks["by_hand"],
    }
    return {
        "variant": name,
        "ranks": len(reports),
        "table_bytes": table,
        "largest_reduce_bytes": buffers,
        "peak_bytes": peaks,
        "checks": checks,
    }


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The narrowest symmetric pair of order statistics that holds the median so surely.

    The k-th smallest and k-th largest of n values enclose it with probability
    1 - 2 P(Binomial(n, 1/2) < k). With too few values it is the whole range.
    """
    ordered = sorted(values)
    n, k, missed = len(ordered), 0, 0.0
    while k < n // 2:
        missed += 2 * math.comb(n, k) / 2**n
        if missed > 1 - confidence:
            break
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[-k]


def say_checks(name: str, checks: Mapping[str, bool], aloud: bool) -> bool:
    """Whether all bounds are kept; `aloud` says of each one whether it is, on stderr."""
    for check, holds in checks.items():
        if aloud:
            print(f"{name}: {check}: {'yes' if holds else 'NO'}", file=sys.stderr, flush=True)
    return all(checks.values())
