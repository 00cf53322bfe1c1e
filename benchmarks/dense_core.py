"""What checkpointing, tensor parallelism, adapters and prefetch come to, beside counts by hand.

Four tables, measured on gloo ranks of this machine: peak activations and time of each mode of
activation checkpointing; bytes of a step on TP 2 x FSDP2 2; memory of a step of all weights and of
LoRA; and what explicit prefetch changes. The exit code is 1 when a bound is broken.

    python -m nox -s benchmark -- dense_core
    python benchmarks/dense_core.py --parts prefetch --steps 30 --check
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import tyro
from dense.sides import CHECKPOINTING, FINE_TUNED, PREFETCH, SPLIT, STACK, WALKED
from dense.verdicts import (
    Part,
    adapters_part,
    checkpointing_part,
    prefetch_part,
    traffic_part,
)
from overhead.measures import compare
from overhead.sides import Variant
from overhead.verdicts import say_checks
from rich.console import Console
from rich.table import Table

from shardwalk.parallelizer_core.testing import RankPool, preload

LORA_RANK = 8

Name = Literal["checkpointing", "traffic", "lora", "prefetch"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one run."""

    parts: tuple[Name, ...] = ("checkpointing", "traffic", "lora", "prefetch")
    """What to show; all in one run."""
    steps: int = 15
    """Timed steps of each side; 0 only counts."""
    check: bool = True
    """Say for every bound whether it is kept (on stderr)."""


def main(options: Options) -> int:
    """Run the parts, print their tables and return the exit code."""
    preload("transformers.models.llama.modeling_llama", "peft")
    console, kept = Console(width=100, highlight=False), True
    for name in options.parts:
        ranks = SPLIT.world_size if name == "traffic" else 2
        with RankPool(ranks, timeout=1800.0, collective_timeout=300.0) as pool:
            part = PARTS[name](pool, options.steps)
        show(console, part)
        kept &= say_checks(name, part.checks, options.check)
    return 0 if kept else 1


def checkpointing(pool: RankPool, steps: int) -> Part:
    """All modes on a stack whose activations dominate."""
    return checkpointing_part(STACK, pool.run(compare, STACK, CHECKPOINTING, steps))


def traffic(pool: RankPool, steps: int) -> Part:
    """Layers split over two ranks, with whole sequences and split ones."""
    variants = [replace(SPLIT, sequence_parallel=split) for split in (False, True)]
    return traffic_part(variants, [pool.run(compare, each, WALKED, 0) for each in variants])


def lora(pool: RankPool, steps: int) -> Part:
    """All weights, and adapters on the same model."""
    variants = [replace(FINE_TUNED, rank=rank) for rank in (0, LORA_RANK)]
    reports = [pool.run(compare, each, WALKED, 0) for each in variants]
    return adapters_part(FINE_TUNED, reports, LORA_RANK)


def prefetch(pool: RankPool, steps: int) -> Part:
    """Explicit chains of prefetch against torch's own order."""
    return prefetch_part(pool.run(compare, Variant(), PREFETCH, steps))


PARTS: dict[Name, Callable[[RankPool, int], Part]] = {
    "checkpointing": checkpointing,
    "traffic": traffic,
    "lora": lora,
    "prefetch": prefetch,
}


def show(console: Console, part: Part) -> None:
    """Print a part as a table."""
    table = Table(box=None, title=part.title, title_justify="left", padding=(0, 2, 0, 0))
    for index, heading in enumerate(part.headings):
        named = index == 0 or heading == "collective"
        table.add_column(heading, justify="left" if named else "right", no_wrap=True)
    for row in part.rows:
        table.add_row(*row)
    console.print(table)
    if part.note:
        console.print(part.note)
    console.print()


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
