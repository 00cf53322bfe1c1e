"""From the reports of all ranks to one line of JSON, and whether it keeps the bounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from .measures import REDUCE, SideReport
from .sides import Variant

PEAK_BOUND = 1.02
TIME_BOUND = 1.10

Reports = Sequence[dict[str, SideReport]]


def overhead_line(name: str, reports: Reports) -> dict[str, Any]:
    """Walked over by hand: the same traffic and loss, the ratios of peak memory and time.

    Of each timed pair the slowest rank counts. The interval of the median ratio is made of order
    statistics, so that nothing is assumed of the noise.
    """
    ours, theirs = (_side(reports, side) for side in ("walked", "by_hand"))
    seconds = {side: _slowest(reports, side) for side in ("walked", "by_hand")}
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
    if seconds["walked"]:
        ratios = [a / b for a, b in zip(seconds["walked"], seconds["by_hand"], strict=True)]
        low, high = median_interval(ratios)
        line["step_ms"] = {k: round(1000 * statistics.median(v), 1) for k, v in seconds.items()}
        line["time_ratio"] = round(statistics.median(ratios), 4)
        line["time_ratio_95"] = [round(low, 4), round(high, 4)]
        checks[f"time ratio surely below {TIME_BOUND}"] = high < TIME_BOUND
    return line | {"checks": checks}


def tables_line(name: str, variant: Variant, reports: Reports) -> dict[str, Any]:
    """What a unit for each table saves: the largest reduce buffer and the peak of a step."""
    sides = {side: _side(reports, side) for side in reports[0]}
    buffers = {side: report.traffic.largest[REDUCE] for side, report in sides.items()}
    peaks = {side: max(rank[side].peak_bytes for rank in reports) for side in sides}
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


def _side(reports: Reports, side: str) -> SideReport:
    return reports[0][side]


def _slowest(reports: Reports, side: str) -> list[float]:
    return [max(times) for times in zip(*(report[side].seconds for report in reports), strict=True)]
