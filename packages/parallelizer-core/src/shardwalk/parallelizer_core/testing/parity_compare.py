"""Comparing two records, value by value, and saying what differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwalk.parallelizer_core.testing.parity_record import (
    GRADIENT,
    INITIAL,
    PARAMETER,
    Record,
)

_ROWS = 12


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How large a difference of any element of a tensor may be.

    ========================  =====================================================================
    value                     largest difference
    ========================  =====================================================================
    gradient                  relative x max(its largest magnitude, floor x the model's largest)
    parameter after steps     relative x its largest magnitude + update x its largest change
    loss, norm, other floats  relative x its largest magnitude
    first parameter, integer  none: bits are equal
    ========================  =====================================================================

    Adam divides gradients by their own size, so an error in a small one grows to a share of the
    step; hence the share `update` of what a parameter has changed by since the start.
    """

    relative: float = 1e-5
    floor: float = 1e-3
    update: float = 1e-3

    def of(self, section: str, value: Tensor, *, largest_gradient: float, change: float) -> float:
        """The tolerance of a value of the reference, changed by `change` since the start."""
        if section == INITIAL or not value.is_floating_point():
            return 0.0
        scale = largest(value)
        if section == GRADIENT:
            scale = max(scale, self.floor * largest_gradient)
        return self.relative * scale + self.update * change


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One compared value.

    Attributes:
        value: optimizer, section and name, such as ``sgd: gradient head.weight``.
        difference: largest difference of an element; infinite for another shape or NaN.
        tolerance: what it may be.
        magnitude: the reference's largest magnitude.
    """

    value: str
    difference: float
    tolerance: float
    magnitude: float

    @property
    def ratio(self) -> float:
        """The difference in tolerances; above 1 is a failure."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.tolerance if self.tolerance > 0 else math.inf


def compare(
    run: str, expected: Record, actual: Record, start: Mapping[str, Tensor], tolerance: Tolerance
) -> tuple[list[Finding], list[str]]:
    """Compare a subject's record with the reference's, which began with the parameters `start`.

    Returns:
        A finding for each value that both have, and a line for each that is missing or whose ties
        or trainability differ.
    """
    findings: list[Finding] = []
    problems = _structure_problems(run, expected, actual)
    top = max(map(largest, expected.values.get(GRADIENT, {}).values()), default=0.0)
    for section in expected.values | actual.values:
        ours, theirs = expected.values.get(section, {}), actual.values.get(section, {})
        for name in ours.keys() & theirs.keys():
            value = ours[name]
            change = difference(value, start[name]) if section == PARAMETER else 0.0
            finding = Finding(
                value=f"{run}: {section} {name}",
                difference=difference(theirs[name], value),
                tolerance=tolerance.of(section, value, largest_gradient=top, change=change),
                magnitude=largest(value),
            )
            findings.append(finding)
        for name in sorted(ours.keys() ^ theirs.keys()):
            side = "the subject" if name in ours else "one process"
            problems.append(f"{run}: {side} has no {section} {name}")
    return findings, problems


def _structure_problems(run: str, expected: Record, actual: Record) -> list[str]:
    problems = []
    for name, group in expected.ties.items():
        if name in actual.ties and actual.ties[name] != group:
            problems.append(
                f"{run}: parameter {name} is shared by {actual.ties[name]}, "
                f"in one process by {group}"
            )
    changed = set(expected.trainable) ^ set(actual.trainable)
    problems += [f"{run}: parameter {name} changed its requires_grad" for name in sorted(changed)]
    return problems


def rank_disagreements(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each value that some rank holds with other bits than rank 0."""
    lines = []
    for key in dict.fromkeys(key for rank in digests for key in rank):
        wrong = [r for r, held in enumerate(digests) if held.get(key) != digests[0].get(key)]
        if wrong:
            lines.append(f"{key} differs in its bits between rank 0 and ranks {wrong}")
    return lines


def largest(value: Tensor) -> float:
    """The largest magnitude of an element, 0 for an empty tensor."""
    return float(value.double().abs().max()) if value.numel() else 0.0


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two elements; infinite for another shape, dtype or NaN."""
    if one.shape != other.shape or one.is_floating_point() != other.is_floating_point():
        return math.inf
    value = largest(one.double() - other.double())
    return math.inf if math.isnan(value) else value


def describe(findings: Sequence[Finding], problems: Sequence[str]) -> str:
    """The worst findings as a table, below the lines of what is wrong otherwise."""
    lines = [f"  {problem}" for problem in problems[:_ROWS]]
    if len(problems) > _ROWS:
        lines.append(f"  ... and {len(problems) - _ROWS} more")
    bad = sorted((f for f in findings if f.ratio > 1), key=lambda f: -f.ratio)
    if bad:
        width = max(len(finding.value) for finding in bad[:_ROWS])
        lines.append(f"  {len(bad)} of {len(findings)} values are off, the worst first:")
        heads = ("difference", "tolerance", "ratio", "magnitude")
        lines.append(f"  {'value':{width}}" + "".join(f"{head:>12}" for head in heads))
        for f in bad[:_ROWS]:
            numbers = (f.difference, f.tolerance, f.ratio, f.magnitude)
            lines.append(f"  {f.value:{width}}" + "".join(f"{number:12.2e}" for number in numbers))
    return "\n".join(lines)
