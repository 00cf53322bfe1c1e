"""From the reports of all ranks to one line of JSON, and whether it keeps the bounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from overhead.verdicts import median_interval

from .measures import SideReport
from .sides import Variant

TIME_BOUND = 0.85  # at the widths of BOUND_AT; narrower ones are reported
BOUND_AT = 512
ERROR_BOUND = 1e-4

Reports = Sequence[dict[str, SideReport]]


def line_of(name: str, variant: Variant, reports: Reports) -> dict[str, Any]:
    """Ours over the others: memory, bytes, and the ratios of paired steps."""
    peaks = {side: max(each[side].peak_bytes for each in reports) for side in reports[0]}
    sent = {side: sum(each[side].exchanged_bytes for each in reports) for side in reports[0]}
    others = [side for side in peaks if side != "ours"]
    errors = max(each[side].error for each in reports for side in others)
    line: dict[str, Any] = {
        "variant": name,
        "ranks": len(reports),
        "inner": variant.width,
        "peak_mb": {side: round(peak / 1e6, 1) for side, peak in peaks.items()},
        "exchanged_mb": {side: round(size / 1e6, 1) for side, size in sent.items()},
    }
    checks = {
        f"results and gradients equal within {ERROR_BOUND}": errors <= ERROR_BOUND,
        "peak memory no higher": all(peaks["ours"] <= peaks[side] for side in others),
    }
    if reports[0]["ours"].seconds:
        walls = {side: _join(max, [each[side].seconds for each in reports]) for side in peaks}
        cpus = {side: _join(sum, [each[side].cpu_seconds for each in reports]) for side in peaks}
        line["step_ms"] = {
            side: round(1000 * statistics.median(each), 1) for side, each in walls.items()
        }
        line["cpu_ms_of_all_ranks"] = {
            side: round(1000 * statistics.median(each), 1) for side, each in cpus.items()
        }
        plain = min(
            ("per_expert_grouped", "per_expert_loop"), key=lambda side: line["step_ms"][side]
        )
        line["plain"] = plain
        for key, side in (("over_plain", plain), ("over_transformers", "transformers")):
            line[key] = _ratios(walls["ours"], walls[side])
            line[f"{key}_cpu"] = _ratios(cpus["ours"], cpus[side])
            if variant.hidden >= BOUND_AT:
                checks[f"{key} surely below {TIME_BOUND}"] = line[key]["95"][1] < TIME_BOUND
    return line | {"checks": checks}


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The median ratio of paired steps, and where it lies with 95% confidence."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {
        "median": round(statistics.median(ratios), 3),
        "95": [round(end, 3) for end in median_interval(ratios)],
    }


def _join(
    how: Callable[[Sequence[float]], float], times_of_ranks: Sequence[Sequence[float]]
) -> list[float]:
    return [how(times) for times in zip(*times_of_ranks, strict=True)]
