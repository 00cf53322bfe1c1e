"""What a run shows: the table of units, a progress bar, peak memory and comparisons."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass, field
from itertools import groupby
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import nn

from shardwalk.parallelizer_core import UnitInfo, describe_units


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank came to: loss and gradient norm of each step, and its peak memory in bytes.

    `refusal` says why the model cannot be parallelized as the options ask, on every rank alike.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    peak: int = 0
    refusal: str = ""


def peak_memory() -> int:
    """Give the most memory that this process has had so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def print_units(console: Console, model: nn.Module) -> None:
    """Print what each unit holds; equal units that differ in a number only share a line."""
    units = describe_units(model)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("unit", "parameters", "dtype", "mesh", "MB/rank"):
        numbers = heading in {"parameters", "MB/rank"}
        table.add_column(heading, justify="right" if numbers else "left", no_wrap=True)
    for _, equal in groupby(units, key=_without_number):
        same = list(equal)
        table.add_row(_name(same), *_cells(same, same[0].mesh or "whole on every rank"))
    table.add_section()
    table.add_row("together", *_cells(units, ""))
    console.print(table)


def _without_number(unit: UnitInfo) -> tuple[object, ...]:
    pattern = re.sub(r"\d+", "*", unit.name)
    return (pattern, unit.parameters, unit.dtypes, unit.mesh, unit.bytes_per_rank)


def _name(units: list[UnitInfo]) -> str:
    first, last = units[0].name or "(root)", units[-1].name
    return first if len(units) == 1 else f"{first}..{last.rpartition('.')[2]}"


def _cells(units: list[UnitInfo], mesh: str) -> tuple[str, str, str, str]:
    parameters = sum(unit.parameters for unit in units)
    size = sum(unit.bytes_per_rank for unit in units)
    dtypes = "/".join(sorted({dtype for unit in units for dtype in unit.dtypes}))
    return f"{parameters:,}", dtypes, mesh, f"{size / 1e6:,.1f}"


class StepProgress:
    """A progress bar; steps that are done stand above it, one line each."""

    def __init__(self, console: Console, steps: int) -> None:
        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn()
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def done(
        self, step: int, loss: float, norm: float, tokens_per_second: float, **parts: float
    ) -> None:
        """Show one more step as done; `parts` are losses by name that the loss is made of."""
        named = "".join(f"  {name} {value:.4f}" for name, value in parts.items())
        self._bar.console.print(
            f"step {step}  loss {loss:.4f}{named}  gradient norm {norm:.4f}  "
            f"{tokens_per_second:.0f} tokens/s"
        )
        self._bar.advance(self._task)


def print_peaks(console: Console, reports: list[Report], alone: Report) -> None:
    """Print the peak memory of each rank beside that of one process without sharding."""
    ranks, one = _gigabytes(reports), _gigabytes([alone])
    console.print(f"peak memory in GB: {ranks} per rank, {one} in one process")


def print_modes(console: Console, modes: dict[str, list[Report]]) -> None:
    """Print the peak memory of each rank in every mode of checkpointing, one below the other."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("checkpointing", "peak memory per rank in GB"):
        table.add_column(heading, no_wrap=True)
    for mode, reports in modes.items():
        table.add_row(mode, _gigabytes(reports))
    console.print(table)


def _gigabytes(reports: list[Report]) -> str:
    return ", ".join(f"{report.peak / 1e9:.2f}" for report in reports)


def equal(console: Console, what: str, found: float, expected: float) -> bool:
    """Print two numbers, and say whether they are equal up to the order of sums in float32."""
    difference = abs(found - expected) / abs(expected)
    verdict = "equal" if difference <= 1e-5 else "DIFFERENT"
    console.print(f"{what}: {found:.6f} and {expected:.6f}, {verdict} (relative {difference:.0e})")
    return difference <= 1e-5
